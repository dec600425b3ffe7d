"""No compression: gradients travel in their own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.flat import as_flat, flatten, unflatten
from lightning_sync.compressors.plain import PlainBlocks
from lightning_sync.state import ParamSpec, State


@dataclass(frozen=True)
class Exact(Compressor):
    r"""Send gradients as they are: mean = sum_r g_r / N, in the gradient's dtype.

    Payload: ``numel * itemsize`` bytes, pattern ``"sum"``. Unbiased, no memory.
    """

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        return State(tuple(params))

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        flat = as_flat(tensors)
        if flat is None:
            reduced = yield Payload("sum", (flatten(tensors, state.share),))
            return unflatten(reduced.tensors[0], tensors)
        yield Payload("sum", (flat.mul_(state.share),))  # a whole bucket: reduced where it lies
        return tensors

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        return topology.all_reduce(sum(p.numel * p.dtype.itemsize for p in params))

    @override
    def exchanged(self) -> Compressor:
        return PlainBlocks()
