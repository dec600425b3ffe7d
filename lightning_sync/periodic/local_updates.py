"""Dynamic local updates: a replica that is slower makes fewer steps between two exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lightning_sync.comm.board import Board
from lightning_sync.periodic.pace import Pace


def local_steps(longest: int, seconds: Sequence[float], rank: int) -> int:
    r"""Steps between two exchanges of a replica, in proportion to its speed (Liu et al. 2024, DyLU).

    With v the speeds in steps per second, H the steps of the fastest replica:

    .. math:: H_r = \max\left(1, \left\lfloor H \, v_r / \max_q v_q \right\rfloor\right)

    Args:
        longest: H, at least 1.
        seconds: Seconds per step (1 / v) of the replicas that are known, above 0.
        rank: Which of them to answer for.
    """
    share = min(seconds) / seconds[rank]
    return max(1, int(longest * share))


class Speed:
    """Seconds per step of one replica, a mean in which steps count half once `half` further ones were made.

    Attributes:
        seconds: The mean; 0 while nothing is known.
    """

    def __init__(self, half: int) -> None:
        self.seconds = 0.0
        self._half = half

    def add(self, seconds: float, steps: int) -> None:
        """So many steps have taken so many seconds together."""
        if seconds <= 0 or steps < 1:
            return
        kept = 0.5 ** (steps / self._half) if self.seconds else 0.0
        self.seconds = kept * self.seconds + (1 - kept) * seconds / steps


class LocalUpdates:
    """Measures this replica's speed and leaves it in the store, where the others find it at their next exchange.

    Until all replicas have left a note, and after that whenever it cannot be measured, the period stays what it is. No
    rank waits for a note. Costs two calls of the store per exchange. Belongs to the training thread.

    Args:
        board: Where the notes are; nobody else writes there.
        rank: This replica.
        replicas: How many there are.
        longest: Steps between two exchanges of the fastest one.
        waited: Seconds for which this rank has stood still for others until now; they say nothing of its own speed.
        clock: Monotonic seconds.

    Attributes:
        every: This replica's steps between two exchanges.
        speed: What it has measured.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        replicas: int,
        longest: int,
        waited: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every = longest
        self.speed = Speed(longest)
        self._board = board
        self._rank = rank
        self._longest = longest
        self._keys = [str(r) for r in range(replicas)]
        self._silent = set(self._keys)
        self._pace = Pace(lambda: clock() - waited())
        self._since = 0

    def begin(self, step: int) -> None:
        """Measure from this step on; what was before it does not count."""
        self._since = step
        self._pace.mark(step)

    def pause(self) -> None:
        """Leave out the time from now on, such as that of a validation."""
        self._pace.pause()

    def go_on(self) -> None:
        """End a pause, if there is one."""
        self._pace.go_on()

    def exchanged(self, step: int) -> int:
        """An exchange has begun after this step: tell the others, hear of them, and return the period from now on."""
        seconds, steps = self._pace.seconds(step), step - self._since
        self.begin(step)
        if seconds <= 0:
            return self.every
        self.speed.add(seconds * steps, steps)
        self._board.put(str(self._rank), repr(self.speed.seconds))
        self._silent = {key for key in self._silent if not self._board.has(key)}
        if not self._silent:
            notes = [float(note) for note in self._board.read_all(self._keys)]
            self.every = local_steps(self._longest, notes, self._rank)
        return self.every
