"""Two levels: exact inside a node, where bytes are cheap, compressed between nodes, where they are not.

Inside a node every rank first collects the node's sum of *its share* of the parameters (a reduce-scatter), then reduces
that share with the ranks that hold the same place on the other nodes, and finally all ranks of the node pass each other
the results (an all-gather). A share crosses the node's interface once, instead of once per local rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.state import ParamSpec


def levels(asked: bool | None, *, linear: bool, nodes_are_replicas: bool = False) -> bool | None:
    """Whether to reduce on two levels, as asked (`None`: where it is worthwhile), if the aggregator allows it.

    Raises:
        ValueError: if it is asked for with an aggregator that is no sum, over ranks that differ.
    """
    if linear or nodes_are_replicas:  # ranks that hold one copy of the trajectory send the same: their sum is it
        return asked
    if asked:
        raise ValueError(
            "two_level=True adds up what the ranks of a node send before the aggregator sees it: a median, say, would "
            "be one of nodes' sums, which one bad rank spoils. Leave two_level out, or let the ranks of a node be one "
            "replica (strategy='hierarchical')."
        )
    return False


@dataclass(frozen=True)
class Shares:
    """Which part of every parameter belongs to which local rank. A function of the parameters alone, not of buckets.

    Attributes:
        place: This rank's place on its node.
        size: Ranks on the node.
        members: Parameters by compressor, in the order of the route.
        cuts: For every parameter, the slices of the local ranks: `cuts[name][place]`, possibly empty.
    """

    place: int
    size: int
    members: tuple[tuple[ParamSpec, ...], ...]
    cuts: dict[str, tuple[ParamSpec | None, ...]]

    @classmethod
    def plan(
        cls, assigned: Sequence[tuple[Compressor, Sequence[ParamSpec]]], intra: Topology, *, whole: bool = False
    ) -> Shares:
        """Cut every parameter at multiples of its compressor's alignment, or deal whole ones out by size.

        `whole`: all of them, for an aggregator that needs sums over whole parameters.
        """
        size = intra.size
        cuts: dict[str, tuple[ParamSpec | None, ...]] = {}
        load = [0] * size
        for compressor, params in assigned:
            if whole or compressor.alignment is None:
                for param in sorted(params, key=lambda p: -p.numel):  # largest first: even loads
                    place = load.index(min(load))
                    load[place] += param.numel
                    cuts[param.name] = tuple(param if p == place else None for p in range(size))
            else:
                for index, param in enumerate(params):
                    cuts[param.name] = _cut(param, compressor.alignment, size, shift=index)
        return cls(intra.rank, size, tuple(tuple(m) for _, m in assigned), cuts)

    def pieces(self, params: Sequence[ParamSpec], place: int | None = None) -> list[ParamSpec]:
        """The slices of these parameters that a local rank (this one by default) reduces between nodes."""
        cuts = (self.cuts[p.name][self.place if place is None else place] for p in params)
        return [c for c in cuts if c is not None]

    def intra_bytes(self, intra: Topology) -> Bytes:
        """What one local rank sends inside the node per step."""
        by_place = [
            sum(piece.numel * piece.dtype.itemsize for cut in self.cuts.values() if (piece := cut[p]) is not None)
            for p in range(self.size)
        ]
        return intra.all_to_all(by_place) + intra.all_gather(by_place[intra.rank])


def _cut(param: ParamSpec, alignment: int, size: int, shift: int) -> tuple[ParamSpec | None, ...]:
    """Even slices of whole blocks; `shift` turns the order, so that short parameters do not all go to one rank."""
    rows = -(-param.numel // alignment)
    cut: list[ParamSpec | None] = [None] * size
    for i in range(size):
        start, stop = (min(rows * j // size * alignment, param.numel) for j in (i, i + 1))
        if stop > start:
            cut[(i + shift) % size] = param.slice(start, stop)
    return tuple(cut)


@dataclass(frozen=True)
class TwoLevelPlan:
    """How one bucket travels inside a node.

    Attributes:
        slices: For every piece, in the order of its local rank: position of its parameter in the bucket, start, stop.
        splits: Elements per local rank.
        own: This rank's pieces.
    """

    slices: tuple[tuple[int, int, int], ...]
    splits: tuple[int, ...]
    own: tuple[ParamSpec, ...]

    @classmethod
    def make(cls, names: Sequence[str], shares: Shares) -> TwoLevelPlan:
        """The plan for the parameters of one bucket."""
        slices: list[tuple[int, int, int]] = []
        splits: list[int] = []
        own: list[ParamSpec] = []
        for place in range(shares.size):
            total = 0
            for position, name in enumerate(names):
                piece = shares.cuts[name][place]
                if piece is not None:
                    start = piece.start or 0
                    slices.append((position, start, start + piece.numel))
                    total += piece.numel
                    if place == shares.place:
                        own.append(piece)
            splits.append(total)
        return cls(tuple(slices), tuple(splits), tuple(own))

    def scatter(self, tensors: Sequence[Tensor], share: float) -> Reduction:
        """Reduce-scatter: returns this node's sum of `share` times the gradients, for this rank's pieces.

        An all-to-all and a local sum in rank order: gloo's own reduce-scatter is an all-reduce underneath and sends
        twice as much.
        """
        parts = [tensors[i].reshape(-1)[start:stop] for i, start, stop in self.slices]
        flat = torch.cat(parts or [tensors[0].new_empty(0)]).mul_(share)
        received = yield Payload("exchange", (flat,), self.splits)
        total = received.tensors[0].sum(0)
        return [part.view(p.shape) for part, p in zip(total.split([p.numel for p in self.own]), self.own, strict=True)]

    def gather(self, owned: Sequence[Tensor], tensors: Sequence[Tensor]) -> Reduction:
        """All-gather: writes the results of all local ranks into the bucket's tensors."""
        flat = torch.cat([t.reshape(-1) for t in owned]) if owned else tensors[0].new_empty(0)
        received = yield Payload("gather", (flat.to(tensors[0].dtype),), self.splits)
        parts = received.tensors[0].split([stop - start for _, start, stop in self.slices])
        staged = [
            t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors
        ]
        targets = [staged[i].view(-1)[start:stop] for i, start, stop in self.slices]
        if targets:
            torch._foreach_copy_(targets, list(parts))
        for tensor, copy in zip(tensors, staged, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
        return tensors
