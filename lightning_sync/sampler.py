"""A sampler whose ranks draw from one counter, so that fast ranks take more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from lightning_sync.checks import check_flags, check_integer
from lightning_sync.comm.board import Board


class SharedSampler(DistributedSampler[int]):
    """Deals the indices of a data set out to whichever rank asks next.

    All ranks walk through one order of the indices (another in every epoch), and draw the next few places of it from a
    counter in the run's store. So every sample comes once per epoch, and ranks that are twice as fast take twice as
    many. A place that was handed out is never handed out again in that epoch, also after a resume: a rank that dies
    loses at most what it held.

    Use it as ``DataLoader(data, batch_size=8, sampler=SharedSampler(data))``. How many batches a rank will get is not
    known before, so the loader has no length; ranks run out at different times and are kept together by
    ``uneven="join"``. In modes whose replicas meet after equal numbers of steps, a slow rank still holds the others up
    at every meeting, so there is little to gain.

    In the middle of an epoch it can be resumed with the same ranks, if the loader has a `batch_size`.

    Args:
        data: The data set, or how many samples it has.
        chunk: Places that a rank draws at once. Larger asks the store less often (once per chunk, a fraction of a
            millisecond on a quiet network), smaller lets ranks end closer together: with at most one batch, and loaders
            that do not run ahead (``num_workers=0``), within one batch of the slowest.
        shuffle: Whether the order is random; else it is that of the data.
        seed: Of the order; the same on all ranks.

    Raises:
        ValueError: for a wrong value.
    """

    def __init__(self, data: Sized | int, *, chunk: int = 16, shuffle: bool = True, seed: int = 0) -> None:
        # Not the base's: that asks the process group, which may not exist yet, how to split the data evenly. It is the
        # base because Lightning leaves such samplers alone, and tells them the epoch.
        size = data if isinstance(data, int) else len(data)
        check_integer("SharedSampler", 0, size=size, seed=seed)
        check_integer("SharedSampler", 1, chunk=chunk)
        check_flags("SharedSampler", shuffle=shuffle)
        self.size = size
        self.chunk = chunk
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._board: Board | None = None
        self._rank, self._world_size = 0, 1
        self._check: Callable[[], None] = lambda: None
        self._passes = 0
        self._counted = 0
        self._epoch_of_pass = 0
        self._drawn = 0
        self._handed: deque[int] = deque()
        self._forgotten = 0
        self._left = range(0)
        self._resume: dict[str, Any] | None = None

    def attach(self, board: Board, rank: int, world_size: int, check: Callable[[], None] = lambda: None) -> None:
        """Draw together with other ranks; strategies of this package call it.

        Args:
            board: Where the counter is; keys of this loader alone.
            rank: This rank.
            world_size: Number of ranks.
            check: Called while waiting for other ranks; raises if the run has failed.
        """
        self._board, self._rank, self._world_size, self._check = board, rank, world_size, check
        self._passes = 0

    def __len__(self) -> int:
        raise TypeError("how many indices this rank will draw is not known before")

    def __iter__(self) -> Iterator[int]:
        if self._board is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "SharedSampler has no counter to share: use a strategy of lightning_sync, or call "
                "attach(board, rank, world_size) on every rank first."
            )
        state, self._resume = self._resume, None
        self._passes += 1
        self._epoch_of_pass = self.epoch if state is None else int(state["epoch"])
        self._handed, self._forgotten, self._left, self._counted = deque(), 0, range(0), 0
        held = [] if state is None else [int(place) for place in state["held"]]
        self._drawn = 0 if state is None else int(state["drawn"])
        first = 0 if state is None else self._furthest(self._drawn)
        order = self._order()
        for place in held:
            self._handed.append(place)
        for place in held:
            yield int(order[place])
        while True:
            start = first + self._draw()
            if start >= self.size:
                return
            self._drawn = min(start + self.chunk, self.size)
            self._left = range(start, self._drawn)
            while self._left:
                place, self._left = self._left[0], self._left[1:]
                self._handed.append(place)
                yield int(order[place])

    def state_dict(self, used: int) -> dict[str, Any]:
        """Where this rank is.

        Args:
            used: Indices of this pass that have been trained on; what was handed out beyond is kept.
        """
        while self._forgotten < used and self._handed:
            self._handed.popleft()
            self._forgotten += 1
        held = [*self._handed, *self._left]
        return {"epoch": self._epoch_of_pass, "drawn": self._drawn, "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where `state_dict` was called; on all ranks, of which there are as many as then."""
        self._resume = dict(state)

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self._epoch_of_pass))

    def _draw(self) -> int:
        if self._board is None:
            self._counted += self.chunk
            return self._counted - self.chunk
        return self._board.add(f"{self._passes}/drawn", self.chunk) - self.chunk

    def _furthest(self, drawn: int) -> int:
        """How far all ranks together had drawn: every place before it was handed to one of them."""
        if self._board is None:
            return drawn
        names = [f"{self._passes}/resumed/{rank}" for rank in range(self._world_size)]
        self._board.put(names[self._rank], str(drawn))
        while not all(map(self._board.has, names)):
            self._check()
            time.sleep(0.01)
        return max(map(int, self._board.read_all(names)))
