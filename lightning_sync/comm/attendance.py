"""Which ranks still have data: three ways to know, so that all end an epoch after the same number of batches."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from lightning_sync.comm.board import Board
from lightning_sync.comm.worker import wait_in_slices


class Attendance(ABC):
    """What the ranks know of each other's data, in one pass over it after the other.

    All ranks walk through the same indices 0, 1, ..., as long as any rank has an item with that index.

    Attributes:
        length: Items of the rank that has most, where that is known before.
    """

    length: int | None = None

    @abstractmethod
    def begin(self) -> None:
        """Begin a pass."""

    @abstractmethod
    def take(self, index: int) -> None:
        """Say that this rank has an item with this index; does not wait for anybody."""

    @abstractmethod
    def miss(self, index: int) -> bool:
        """Say that this rank has none, and wait until it is known whether any rank has one."""

    def present(self, index: int) -> list[bool] | None:
        """Whether each rank has an item with this index, after `take` or `miss`; `None` where that is not known."""
        return None

    def close(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Release threads; no collective."""


class KnownLengths(Attendance):
    """Every rank knows the lengths of all.

    Args:
        lengths: Items per rank.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.length = max(lengths)

    @override
    def begin(self) -> None:
        pass

    @override
    def take(self, index: int) -> None:
        pass

    @override
    def miss(self, index: int) -> bool:
        return index < max(self.lengths)

    @override
    def present(self, index: int) -> list[bool]:
        return [index < length for length in self.lengths]


class AskedInStep(Attendance):
    """Ranks that go in step ask each other about every index, by a tiny all-reduce that they do not wait for.

    Only a rank without data waits for the answer. A rank that has some reads it when it comes to that item, which a
    loader has fetched one item ahead: by then the answer is there.

    Args:
        group: A gloo group of all ranks that nothing else uses.
        rank: This rank.
        world_size: Number of ranks.
        check: Called while waiting; raises if the run has failed elsewhere, so that nobody will answer.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, world_size: int, check: Callable[[], None] = lambda: None
    ) -> None:
        self.group = group
        self._rank = rank
        self._world_size = world_size
        self._check = check
        self._asked: dict[int, tuple[dist.Work, Tensor]] = {}

    @override
    def begin(self) -> None:
        for index in list(self._asked):
            self._answer(index)
        self._asked = {}

    @override
    def take(self, index: int) -> None:
        self._ask(index, here=True)

    @override
    def miss(self, index: int) -> bool:
        self._ask(index, here=False)
        return bool(self._answer(index).any())

    @override
    def present(self, index: int) -> list[bool]:
        found = [bool(bit) for bit in self._answer(index).tolist()]
        # Loaders run ahead, so later ones may have been asked for already.
        self._asked = {i: pending for i, pending in self._asked.items() if i >= index}
        return found

    def _ask(self, index: int, *, here: bool) -> None:
        bits = torch.zeros(self._world_size, dtype=torch.uint8)
        bits[self._rank] = here
        self._asked[index] = (dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group, async_op=True), bits)

    def _answer(self, index: int) -> Tensor:
        work, bits = self._asked[index]

        def given_up() -> bool:
            self._check()
            return False

        wait_in_slices(work, given_up)
        return bits


class NotedInStore(Attendance):
    """Ranks that run freely leave notes in the store: how far those with data are, and where the others' ends are.

    A rank that has run out says so, and how many items it had; once a count of such ranks says that all have, everybody
    knows the end. Until then it follows the rank that is furthest ahead. As long as no rank has run out, a background
    thread makes one store call per `interval`, and the main thread none.

    Args:
        store: One that all ranks share. It is cloned.
        prefix: What all keys start with; the same on all ranks, and of this loader alone.
        rank: This rank.
        world_size: Number of ranks.
        check: Called while waiting; raises if the run has failed elsewhere.
        interval: Seconds between two looks; longer with many ranks, since all look.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world_size: int,
        check: Callable[[], None] = lambda: None,
        interval: float = 0.02,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._check = check
        self._interval = interval * -(-world_size // 32)
        self._board = Board(store, prefix)  # of the main thread
        self._pass = -1
        self._front = -1
        self._ended = False
        self._fronts = [-1] * world_size
        self._told = False  # whether somebody waits for notes
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(
            target=self._publish, args=(Board(store, prefix),), name="lightning_sync-data", daemon=True
        )
        self._thread.start()

    @override
    def begin(self) -> None:
        # In this order: the thread publishes the front of the pass that it has read before.
        self._front, self._ended, self._told = -1, False, False
        self._fronts = [-1] * self._world_size
        self._pass += 1

    @override
    def take(self, index: int) -> None:
        self._front = index
        if self._told:
            self._wake.set()

    @override
    def miss(self, index: int) -> bool:
        name = f"{self._pass}/"
        if not self._ended:
            self._ended = True
            self._board.put(f"{name}length/{self._rank}", str(index))
            self._board.add(f"{name}ended", 1)
        pause = 0.001
        while True:
            if self._board.add(f"{name}ended", 0) == self._world_size:
                lengths = self._board.read_all([f"{name}length/{rank}" for rank in range(self._world_size)])
                return index < max(map(int, lengths))
            if self._somebody_has(index, name):
                return True
            self._check()
            time.sleep(pause)
            pause = min(2 * pause, self._interval)

    @override
    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _somebody_has(self, index: int, name: str) -> bool:
        # The rank that was furthest ahead the last time is asked first, and mostly is the only one that is asked.
        for rank in sorted(range(self._world_size), key=lambda r: -self._fronts[r]):
            if self._fronts[rank] < index and self._board.has(f"{name}front/{rank}"):
                self._fronts[rank] = int(self._board.read(f"{name}front/{rank}"))
            if self._fronts[rank] >= index:
                return True
        return False

    def _publish(self, board: Board) -> None:
        said = (-1, -1)
        try:
            while not self._closing:
                passing, front = self._pass, self._front
                if passing >= 0 and (self._told or board.add(f"{passing}/ended", 0)):
                    self._told = passing == self._pass
                    if passing == self._pass and front >= 0 and (passing, front) != said:
                        board.put(f"{passing}/front/{self._rank}", str(front))
                        said = (passing, front)
                        continue
                self._wake.wait(self._interval)
                self._wake.clear()
        except RuntimeError:  # the store has gone: so has the run, as the watcher will say
            return
