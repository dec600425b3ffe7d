"""The wire: one round of payloads in, the combined payloads out, every byte counted.

All ranks of a group call `Wire.round` with payloads of the same shapes in the same order; that is the whole protocol.
Payloads of one pattern are fused: a round costs one collective per pattern (and per dtype, for sums), however many
compressors take part in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.counters import Counters, Phase
from lightning_sync.comm.topology import Bytes, Topology

if TYPE_CHECKING:
    from lightning_sync.compressors.base import Payload


class Wire(ABC):
    """Who talks to whom: a group of N ranks."""

    rank: int
    size: int

    @abstractmethod
    def start(self, payloads: Sequence[Payload]) -> Callable[[], list[Payload]]:
        """Issue one collective round; the returned function waits for it, see `Payload` for what comes back."""

    def round(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Run one collective round."""
        return self.start(payloads)()

    @abstractmethod
    def any(self, flags: Tensor) -> Tensor:
        """Element-wise maximum over the ranks of an integer tensor (in place): 1 where any rank has 1."""

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A context for one phase of a reduction over this wire; one that keeps no time does nothing."""
        return nullcontext()


class GroupWire(Wire):
    """A wire over a torch process group of its own.

    Args:
        group: A group that nothing else uses: collectives of two users on one group get mixed up when two threads
            issue them, and gloo then aborts the process.
        topology: The group's ranks and their nodes.
        counters: Where bytes are counted.
        wait: Blocks until a collective is done; the default is the collective's own `wait`. The communication thread
            passes one that a failure elsewhere can end.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        topology: Topology,
        counters: Counters,
        wait: Callable[[dist.Work], None] | None = None,
    ) -> None:
        self.group = group
        self.topology = topology
        self.counters = counters
        self.rank = topology.rank
        self.size = topology.size
        self._block = wait or (lambda work: work.wait())

    @override
    def phase(self, name: Phase) -> AbstractContextManager[None]:
        return self.counters.phase(name)

    def _wait(self, work: dist.Work) -> None:
        with self.counters.phase("wire"):
            self._block(work)

    @override
    def start(self, payloads: Sequence[Payload]) -> Callable[[], list[Payload]]:
        """Issue everything, sums first, in the order of the payloads; it is waited for in that order."""
        results: list[Payload | None] = [None] * len(payloads)
        finishers: list[Callable[[], None]] = []
        if self.size == 1:
            alone = [_alone(p) for p in payloads]
            return lambda: alone
        sums = [(i, j) for i, p in enumerate(payloads) if p.pattern == "sum" for j in range(len(p.tensors))]
        self._start_sums(payloads, sums, finishers)
        for i, payload in enumerate(payloads):
            if payload.pattern == "sum":
                results[i] = payload
        for pattern in ("exchange", "gather"):
            members = [i for i, p in enumerate(payloads) if p.pattern == pattern]
            if members:
                self._start_rows([payloads[i] for i in members], pattern, members, results, finishers)

        def finish() -> list[Payload]:
            for part in finishers:
                part()
            return [r for r in results if r is not None]

        return finish

    @override
    def any(self, flags: Tensor) -> Tensor:
        return self.maximum(flags)

    def maximum(self, values: Tensor) -> Tensor:
        """Element-wise maximum over the ranks, in place."""
        if self.size > 1 and values.numel():
            self._count_ring(values)
            self._wait(dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group, async_op=True))
        return values

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with rank `source`'s (a rank of this group)."""
        if self.size > 1:
            self.counters.count(
                tensor.nbytes, self.topology.broadcast(tensor.nbytes, source), self.topology.direct_messages
            )
            self._wait(dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def _count_ring(self, tensor: Tensor) -> None:
        self.counters.count(tensor.nbytes, self.topology.all_reduce(tensor.nbytes), self.topology.ring_messages)

    def _start_sums(
        self, payloads: Sequence[Payload], sums: list[tuple[int, int]], finishers: list[Callable[[], None]]
    ) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for i, j in sums:
            tensor = payloads[i].tensors[j]
            if tensor.numel():  # gloo refuses an empty all-reduce; every rank skips it alike
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            flat = tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
            self._count_ring(flat)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            finishers.append(lambda work=work, flat=flat, tensors=tensors: self._finish_sums(work, flat, tensors))  # type: ignore[misc]

    def _finish_sums(self, work: dist.Work, flat: Tensor, tensors: list[Tensor]) -> None:
        self._wait(work)
        if flat is not tensors[0]:
            parts = flat.split([t.numel() for t in tensors])
            torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])

    def _start_rows(
        self,
        payloads: list[Payload],
        pattern: str,
        members: list[int],
        results: list[Payload | None],
        finishers: list[Callable[[], None]],
    ) -> None:
        """Fuse all tensors of these payloads into one all-to-all of bytes."""
        columns = [_Column(t, p.splits) for p in payloads for t in p.tensors]
        everyone = range(self.size)
        if pattern == "exchange":
            pieces = [c.piece(peer) for peer in everyone for c in columns]
            sent = [sum(c.nbytes(peer) for c in columns) for peer in everyone]
            received = [sum(c.nbytes(self.rank) for c in columns)] * self.size
        else:
            own = [c.bytes() for c in columns]
            pieces = own * self.size
            sent = [sum(t.numel() for t in own)] * self.size
            received = [sum(c.nbytes(peer) for c in columns) for peer in everyone]
        source = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        target = torch.empty(sum(received), dtype=torch.uint8, device=source.device)
        cost = self.topology.all_to_all(sent)
        self.counters.count(sum(sent) - sent[self.rank], cost, self.topology.direct_messages)
        work = dist.all_to_all_single(target, source, received, sent, group=self.group, async_op=True)

        def finish(source: Tensor = source) -> None:  # keeps the source alive until the collective is done
            self._wait(work)
            combined = iter(
                _unfuse(target, received, columns, exchange_rank=self.rank if pattern == "exchange" else None)
            )
            for i, payload in zip(members, payloads, strict=True):
                results[i] = replace(payload, tensors=tuple(next(combined) for _ in payload.tensors))

        finishers.append(finish)


class _Column:
    """One tensor of rows, seen as bytes."""

    def __init__(self, tensor: Tensor, splits: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.splits = splits
        self.row_shape = tuple(tensor.shape[1:])
        self.row_bytes = torch.Size(self.row_shape).numel() * tensor.element_size()
        self.starts = [sum(splits[:r]) for r in range(len(splits))]

    def nbytes(self, rank: int) -> int:
        return self.splits[rank] * self.row_bytes

    def bytes(self) -> Tensor:
        return self.tensor.contiguous().view(-1).view(torch.uint8)

    def piece(self, rank: int) -> Tensor:
        start = self.starts[rank] * self.row_bytes
        return self.bytes()[start : start + self.nbytes(rank)]

    def restore(self, raw: Tensor, *lead: int) -> Tensor:
        if not raw.numel():  # a view of nothing still has to start at a multiple of the element size
            return self.tensor.new_empty(*lead, *self.row_shape)
        return raw.contiguous().view(-1).view(self.tensor.dtype).view(*lead, *self.row_shape)


def _unfuse(target: Tensor, received: list[int], columns: list[_Column], exchange_rank: int | None) -> list[Tensor]:
    if exchange_rank is not None:  # every source sent the same number of bytes
        rows = target.view(len(received), -1)
        out, offset = [], 0
        for column in columns:
            width = column.nbytes(exchange_rank)
            own = column.splits[exchange_rank]
            out.append(column.restore(rows[:, offset : offset + width], len(received), own))
            offset += width
        return out
    parts: list[list[Tensor]] = [[] for _ in columns]
    start = 0
    for peer, length in enumerate(received):
        offset = start
        for part, column in zip(parts, columns, strict=True):
            part.append(target[offset : offset + column.nbytes(peer)])
            offset += column.nbytes(peer)
        start += length
    return [c.restore(torch.cat(p), sum(c.splits)) for c, p in zip(columns, parts, strict=True)]


def _alone(payload: Payload) -> Payload:
    """A group of one: a sum and a gather are what was sent; an exchange gains the leading axis of one sender."""
    if payload.pattern == "exchange":
        return replace(payload, tensors=tuple(t.unsqueeze(0) for t in payload.tensors))
    return payload


__all__ = ["Bytes", "GroupWire", "Wire"]
