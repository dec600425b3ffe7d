"""Half the bytes: gradients as 16-bit floats, summed as such on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.flat import as_flat, flatten, unflatten
from lightning_sync.compressors.plain import PlainBlocks
from lightning_sync.state import ParamSpec, State


@dataclass(frozen=True)
class _Cast(Compressor):
    """mean = sum_r cast(g_r / N): divided first, cast second, so that a sum of N cannot overflow where the mean fits.

    Payload: ``2 * numel`` bytes, pattern ``"sum"``; also for vectors, as a cast costs nothing to apply. The sum is
    accumulated in 16 bits on the wire, so its relative error grows with N. Rounding only: no error feedback by
    default.
    """

    dtype: ClassVar[torch.dtype]

    def init(self, params: Sequence[ParamSpec]) -> State:
        return State(tuple(params))

    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        reduced = yield Payload("sum", (flatten(tensors, state.share, self.dtype),))
        means = unflatten(reduced.tensors[0], tensors)
        self.check(keys, means)
        return means

    def check(self, keys: Sequence[str], means: Sequence[Tensor]) -> None:
        """Refuse a result that the format could not hold."""

    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        return topology.all_reduce(2 * sum(p.numel for p in params))


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16 on the wire: float32's range, 8 bits of precision (relative rounding error at most 2^-8)."""

    dtype = torch.bfloat16

    @override
    def exchanged(self) -> Compressor:
        return PlainBlocks(dtype=self.dtype)


@dataclass(frozen=True)
class FP16(_Cast):
    """float16 on the wire: 11 bits of precision (relative error at most 2^-11), between 6e-8 and 65504.

    Raises:
        OverflowError: (in the step, on the ranks that reduce the parameter, and through them everywhere) if a mean is
            above 65504 or not finite; the message names the parameter. On CUDA the check would stop the host in every
            bucket: there inf appears in the gradients.
    """

    dtype = torch.float16

    @override
    def check(self, keys: Sequence[str], means: Sequence[Tensor]) -> None:
        if means[0].device.type != "cpu":
            return
        # One sum over everything is the cheapest look: finite numbers below 65504 cannot add up to inf in float32.
        flat = as_flat(means)
        parts = means if flat is None else [flat]
        if all(math.isfinite(float(part.sum(dtype=torch.float32))) for part in parts):
            return
        bad = [key for key, mean in zip(keys, means, strict=True) if not bool(mean.isfinite().all())]
        raise OverflowError(
            f"compressor 'fp16': the mean gradient of {', '.join(map(repr, bad))} is not finite in float16, whose "
            "largest number is 65504. Use compressor='bf16', clip or scale the loss, or look for a diverged loss."
        )
