"""How far a rank's main thread is, for how long it has not begun a new step, and which ranks hold the others up."""

from collections.abc import Iterable
from typing import NamedTuple

from lightning_sync.comm.heartbeat import Straggler


class Place(NamedTuple):
    """What the main thread does.

    Attributes:
        phase: In words.
        order: Its position within a step: a rank with a smaller one is behind.
        paused: Whether the time spent here is left out of ``step_timeout``, for all ranks.
        waiting: Whether it is left out for this rank alone, as long as another one does something else: that one may
            take its own time for a step, and is to blame if it takes more.
    """

    phase: str
    order: int
    paused: bool
    waiting: bool = False


SETUP = Place("set-up", 0, True)
DATA = Place("waiting for data", 1, False)
FORWARD = Place("forward", 2, False)
BACKWARD = Place("backward", 3, False)
OPTIMIZER = Place("optimizer step and callbacks", 4, False)
VALIDATION = Place("validation", 5, True)
SAVING = Place("saving", 6, True)
COMPILATION = Place("compilation", 2, True)
OUT_OF_DATA = Place("out of data, while others have some", 6, False)
SLOWER_REPLICAS = Place("waiting for slower replicas", 6, False, True)
END = Place("the end of training", 7, True)


class StepClock:
    """Seconds that the main thread has spent in its step: without pauses, and without time spent suspended.

    Args:
        step_timeout: Seconds that a step may take.
        first_timeout: Seconds that the first step may take, in which kernels are compiled and data workers start.
        longest_gap: Seconds counted at most between two looks.
    """

    def __init__(self, step_timeout: float, first_timeout: float, longest_gap: float) -> None:
        self._step_timeout = step_timeout
        self._first_timeout = max(step_timeout, first_timeout)
        self._longest_gap = longest_gap
        self._last: float | None = None
        self._step = 0
        self.seconds = 0.0

    def tick(self, now: float, step: int, paused: bool) -> None:
        """Look at the main thread: it has begun ``step`` steps; ``paused`` if the time since the last look is free."""
        passed = 0.0 if self._last is None else min(now - self._last, self._longest_gap)
        self._last = now
        if step != self._step:
            self._step, self.seconds = step, 0.0
        elif not paused:
            self.seconds += passed

    @property
    def limit(self) -> float:
        """Seconds that the present step may take."""
        return self._first_timeout if self._step <= 1 else self._step_timeout

    @property
    def percent(self) -> int:
        """The share of the limit that is used up."""
        return int(100 * self.seconds / self.limit)


def who_is_missing(rows: Iterable[Straggler], silence: float) -> list[Straggler]:
    """The ranks that hold the others up, once a step has taken too long.

    A rank that has gone silent is one. Else it is those furthest behind (by step, phase and finished collectives)
    among the ranks that stand still themselves: a slow rank that moves is waited for, not to blame.

    Args:
        rows: All unfinished ranks, the asking one included.
        silence: Seconds without a sign of life that count as silence.

    Returns:
        Ranks in order; all that stand still, if none is behind another.
    """
    rows = list(rows)
    silent = [row for row in rows if row.silent_for >= silence]
    if silent:
        return silent
    still = [row for row in rows if row.percent >= _STILL]
    first = min((row.position for row in still), default=None)
    return [row for row in still if row.position == first]


_STILL = 50


def explain_missing(missing: list[Straggler], rows: list[Straggler], limit: float) -> str:
    """The message about ranks that hold the others up; the first of them is the subject of the sentence."""
    text = f"its step has not ended within {limit:g} s (step_timeout)"
    others = [row.rank for row in rows if row.rank not in {m.rank for m in missing}]
    if not others and len(rows) > 1:
        return (
            f"{text}, and no rank is behind another: {'; '.join(map(str, rows))}. Their collectives do not match, or "
            "the network between them does not answer"
        )
    text += f", last heard of {missing[0].silent_for:.1f} s ago"
    if len(missing) > 1:
        text += f"; missing too: {'; '.join(map(str, missing[1:]))}"
    if others:
        text += f"; waiting for it: ranks {', '.join(map(str, others))}"
    return text
