"""No compression, but every rank's contribution reaches an owner: for aggregators that are no sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Reduction
from lightning_sync.compressors.blocks import BlockCodec, owned_rows
from lightning_sync.state import ParamSpec, State


@dataclass(frozen=True)
class PlainBlocks(BlockCodec):
    """Send gradients as they are, to the owners of their blocks and back.

    What `Exact` sends by all-reduce, by all-to-all and all-gather: the same bytes, but for the padding of every
    parameter to whole blocks. Takes the place of `Exact` and of the casts where the aggregator is no sum.

    Payload: ``32 * ceil(numel / 32)`` elements per parameter by default, pattern ``"exchange"`` then ``"gather"``.

    Args:
        block: Elements that one rank owns together. Larger: less shuffling of memory, more padding of short vectors.
        dtype: What values travel as; `None`: the gradient's own dtype.
    """

    block: int = 32
    dtype: torch.dtype | None = None

    @override
    def accepts(self, param: ParamSpec) -> bool:
        return True

    @override
    def encode(self, blocks: Tensor) -> tuple[Tensor, ...]:
        return (blocks if self.dtype is None else blocks.to(self.dtype),)

    @override
    def decode(self, code: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return code[0].to(dtype)

    @override
    def row_bytes(self) -> int:
        return self.block * (self.dtype or torch.float32).itemsize

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        own = replace(self, dtype=self.dtype or tensors[0].dtype)
        return (yield from super(PlainBlocks, own).reduce(keys, tensors, state))

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        owned, first = [0] * topology.size, 0
        for p in params:  # a block is as wide as its parameter's dtype
            rows = -(-p.numel // self.block)
            for rank in range(topology.size):
                count = owned_rows(first + rows, rank, topology.size) - owned_rows(first, rank, topology.size)
                owned[rank] += count * self.block * (self.dtype or p.dtype).itemsize
            first += rows
        return topology.all_to_all(owned) + topology.all_gather(owned[topology.rank])
