"""Where the blocks of a bucket lie in its gradients, and what else the arithmetic on them needs to know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lightning_sync.compressors.blocks import BlockPlan, block_plan
from lightning_sync.compressors.random import row_streams
from lightning_sync.state import State

DIRECT_FROM = 2**14
"""Elements from which a parameter is worth a kernel call of its own; smaller ones are collected first."""
CALL = 2**22
"""Elements of one kernel call on a CPU: what it returns is then still in the cache when it is put in its place."""


@dataclass
class Rows:
    """Rows that are worked on in one go.

    Attributes:
        first: First row.
        last: Row after the last.
        direct: Whether they lie in one parameter as they are.
        pieces: What they are made of: parameter, its elements from and to, and where those begin in the rows.
    """

    first: int
    last: int
    direct: bool
    pieces: list[tuple[int, int, int, int]]


@dataclass
class Layout:
    """What a bucket's blocks need beside `BlockPlan`, computed once per bucket.

    Attributes:
        plan: The plan.
        runs: All rows.
        streams: Where the noise of every row starts, of this rank's and of the owner's rows; empty if not needed.
        padding: Flat places of elements that are padding, among this rank's rows and the owner's; empty if not needed.
    """

    plan: BlockPlan
    runs: list[Rows]
    streams: tuple[Tensor, Tensor]
    padding: tuple[Tensor, Tensor]

    def read(self, flats: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
        """The gradients as blocks: first row, row after the last, blocks; for reading.

        Large ones are given where they lie, small ones and ragged ends in a copy.
        """
        for run in self.runs:
            blocks = self._direct(run, flats)
            if blocks is None:
                blocks, inside, outside = self._copies(run, flats)
                torch._foreach_copy_(inside, outside)
            yield run.first, run.last, blocks

    def write(self, flats: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
        """As `read`, but to be filled; a copy is written into the gradients afterwards."""
        for run in self.runs:
            blocks = self._direct(run, flats)
            if blocks is not None:
                yield run.first, run.last, blocks
                continue
            blocks, inside, outside = self._copies(run, flats)
            yield run.first, run.last, blocks
            torch._foreach_copy_(outside, inside)

    def _direct(self, run: Rows, flats: Sequence[Tensor]) -> Tensor | None:
        i, start, stop, _ = run.pieces[0]
        if not run.direct or flats[i].dtype != self.plan.dtype:
            return None
        return flats[i][start:stop].view(-1, self.plan.block)

    def _copies(self, run: Rows, flats: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        size = run.last - run.first, self.plan.block
        blocks = torch.zeros(size, dtype=self.plan.dtype, device=flats[0].device)
        inside = [blocks.view(-1)[at : at + stop - start] for _, start, stop, at in run.pieces]
        return blocks, inside, [flats[i][start:stop] for i, start, stop, _ in run.pieces]


def layout(keys: Sequence[str], state: State, block: int, *, noisy: bool, keeps_zeros: bool) -> Layout:
    """The layout of a bucket, made at first use.

    Args:
        keys: Its parameters.
        state: The codec's state.
        block: Elements of a block.
        noisy: Whether streams of noise are needed.
        keeps_zeros: Whether padding needs no care.
    """
    cache_key = ("layout", tuple(keys))
    if cache_key not in state.cache:
        state.cache[cache_key] = _make(keys, state, block, noisy, keeps_zeros)
    return cast(Layout, state.cache[cache_key])


def _make(keys: Sequence[str], state: State, block: int, noisy: bool, keeps_zeros: bool) -> Layout:
    plan = block_plan(block, keys, state)
    sizes = [torch.Size(shape).numel() for shape in plan.shapes]
    mine = plan.order.cpu().split(plan.splits)[plan.rank]  # the rows this rank owns
    found = [torch.zeros(0, dtype=torch.int64)] * 4
    if noisy:
        counts = [range(-(-size // block)) for size in sizes]
        owners = row_streams(state.seed, [("owner", k) for k in keys], counts)
        found[:2] = row_streams(state.seed, [("worker", state.rank, k) for k in keys], counts), owners[mine]
    if not keeps_zeros:
        filled = torch.zeros(plan.rows, block)
        for start, size in zip(plan.starts, sizes, strict=True):
            filled.view(-1)[start * block : start * block + size] = 1
        found[2:] = ((rows == 0).view(-1).nonzero().view(-1) for rows in (filled, filled[mine]))
    device = plan.order.device
    a, b, c, d = (t.to(device) for t in found)
    limit = max(1, CALL // block) if device.type == "cpu" else plan.rows
    return Layout(plan, _runs(sizes, plan.starts, block, limit), (a, b), (c, d))


def _runs(sizes: Sequence[int], starts: Sequence[int], block: int, limit: int) -> list[Rows]:
    """Whole blocks of large parameters, at most `limit` at a time, and what lies between them."""
    runs: list[Rows] = []
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        whole = size // block * block if size >= DIRECT_FROM else 0
        for a in range(0, whole, limit * block):
            b = min(a + limit * block, whole)
            runs.append(Rows(start + a // block, start + b // block, True, [(i, a, b, 0)]))
        if whole == size:
            continue
        first = start + whole // block
        if not runs or runs[-1].direct:
            runs.append(Rows(first, first, False, []))
        runs[-1].pieces.append((i, whole, size, (first - runs[-1].first) * block))
        runs[-1].last = start - (-size // block)
    return runs
