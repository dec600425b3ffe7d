"""One replica of the simulated world: its parameters, what it has sent, and what it waits for."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lightning_sync.asynchronous.problems import Problem
from lightning_sync.asynchronous.shard import Read


class Learner:
    """A replica.

    Args:
        number: Its number.
        values: Where it starts, `[n]`.
        parts: (start, stop) of every shard.
        push: ``"delta"`` or ``"gradient"``.
        lr: Learning rate of its SGD.
        momentum: Momentum of its SGD.
        generator: Of its data.
    """

    def __init__(
        self,
        number: int,
        values: Tensor,
        parts: list[tuple[int, int]],
        push: str,
        lr: float,
        momentum: float,
        generator: torch.Generator,
    ) -> None:
        self.number = number
        self._local, self._parts, self._push = values, parts, push
        self._lr, self._momentum, self._generator = lr, momentum, generator
        self._velocity = torch.zeros_like(values)
        self._gradient = torch.zeros_like(values)
        # What progress is measured from: the values last read, less what was sent and is not in them.
        self._base = values.clone()
        self._unseen: list[deque[tuple[int, Tensor]]] = [deque() for _ in parts]
        self._next = [0] * len(parts)
        self.versions = [-1] * len(parts)
        self.contains: list[dict[int, int]] = [{} for _ in parts]
        self.steps = self.lost = self.since_push = 0
        self.next_clock = 0
        """One more than the highest clock it has sent."""
        self.alive, self.busy, self.returning = True, False, False
        self.attempt = self.life = 0
        self.inbox: dict[int, Read] = {}
        self.asked: set[int] = set()
        self.awaiting: set[int] = set()
        """Owners from which values are due that contain all it has sent."""
        # Exchanges sent, taken by each owner, and taken by all of them.
        self._sent, self._taken, self._finished = 0, [0] * len(parts), 0
        self.waiting_since: float | None = None
        self.waited = 0.0

    @property
    def unacknowledged(self) -> int:
        """Exchanges that some owner has not acknowledged."""
        return self._sent - self._finished

    def step(self, problem: Problem) -> None:
        """One step of SGD, or the gradient that will be sent instead."""
        gradient = problem.gradient(self._local, self._generator)
        if self._push == "gradient":
            self._gradient = gradient
        else:
            if self._momentum:
                gradient = self._velocity.mul_(self._momentum).add_(gradient)
            self._local.sub_(gradient, alpha=self._lr)
        self.steps += 1
        self.since_push += 1

    def take_progress(self, owner: int) -> tuple[Tensor, int]:
        """What to send to an owner now, and its sequence number."""
        part = slice(*self._parts[owner])
        if self._push == "gradient":
            delta = self._gradient[part].clone()
        else:
            delta = self._base[part] - self._local[part]
            self._base[part] = self._local[part]
            self._unseen[owner].append((self._next[owner], delta))
        self._next[owner] += 1
        return delta, self._next[owner] - 1

    def pushed(self, clock: int) -> None:
        """Everything has been handed to the network, as the update of this clock."""
        self.since_push, self.next_clock = 0, clock + 1
        self._sent += 1
        self.awaiting = set(range(len(self._parts)))

    def acknowledge(self, owner: int) -> bool:
        """This owner has taken one contribution more; True when that finishes an exchange."""
        self._taken[owner] += 1
        finished = min(self._taken) > self._finished
        self._finished += finished
        return finished

    def merge(self, owner: int, read: Read) -> None:
        """Take over what an owner answered: its values, less what it has not seen of this replica."""
        if read.version < self.versions[owner]:
            return
        self.versions[owner], self.contains[owner] = read.version, read.contains
        seen = read.sequences.get(self.number, 0)
        unseen = self._unseen[owner]
        while unseen and unseen[0][0] < seen:
            unseen.popleft()
        if self.returning or seen >= self._next[owner]:  # who returns has sent nothing yet in this life
            self.awaiting.discard(owner)
            self.returning = self.returning and bool(self.awaiting)
        if read.values is None:
            return
        part = slice(*self._parts[owner])
        base = read.values.clone()
        for _, delta in unseen:
            base -= delta
        self._local[part] += base - self._base[part]
        self._base[part] = base

    def fail(self, now: float, *, forget: bool) -> None:
        """The replica dies, in the middle of whatever it did.

        Args:
            now: When.
            forget: Whether its memory and its connections die with it.
        """
        self.alive, self.busy = False, False
        self.attempt += 1
        self.stop_waiting(now)
        for owner, read in self.inbox.items():
            self.merge(owner, read)
            self.asked.discard(owner)
        self.inbox.clear()
        if not forget:
            return
        self.life += 1
        self.lost += self.since_push
        self.since_push = 0
        self._sent, self._taken, self._finished = 0, [0] * len(self._parts), 0
        self.asked.clear()

    def restart(self, sequences: list[int]) -> None:
        """Back with nothing; the values that the owners send are what it starts from.

        Args:
            sequences: What each owner expects next.
        """
        self._velocity.zero_()
        self._base.copy_(self._local)
        self._next = list(sequences)
        for unseen in self._unseen:
            unseen.clear()
        self.versions = [-1] * len(self._parts)
        self.contains = [{} for _ in self._parts]
        self.awaiting, self.returning = set(range(len(self._parts))), True

    def stop_waiting(self, now: float) -> None:
        """Account for a wait that ends."""
        if self.waiting_since is not None:
            self.waited += now - self.waiting_since
            self.waiting_since = None
