"""A quarter of the bytes: int8 in blocks, each with its own scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.compressors.blocks import BlockCodec


@dataclass(frozen=True)
class BlockInt8(BlockCodec):
    r"""Symmetric int8 quantisation with one float32 scale per block of `block` elements.

    For a block x: scale s = max|x| / 127, code q = round(x / s) in [-127, 127], decoded value q s. The error of an
    element is at most s/2, that is max|x| / 254 of its block (6e-39 if that is less). Blocks of zeros decode to zeros;
    non-finite elements make their whole block NaN, so that overflow stays visible.

    Payload: ``rows * (block + 4)`` bytes with ``rows = ceil(numel / block)`` per parameter, pattern ``"exchange"``
    then ``"gather"``: each rank sends 2 (N-1)/N of it, 0.25 of float32. Rounding is deterministic, hence biased:
    error feedback is wrapped around it by default, which costs one float32 per element of memory, and 1/N more for
    the blocks a rank owns.

    Args:
        block: Elements per scale. Larger: fewer bytes (4/block per element), larger errors where magnitudes differ.
    """

    block: int = 256
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or not 8 <= self.block <= 65536:
            raise ValueError(f"BlockInt8(block={self.block!r}): block must be an integer from 8 to 65536.")

    @override
    def encode(self, blocks: Tensor) -> tuple[Tensor, ...]:
        # Float32 scales whatever the state's dtype, and none below the smallest normal number: 0/s is 0, as it must be.
        tiny = torch.finfo(torch.float32).tiny
        scale = blocks.abs().amax(-1, keepdim=True).div_(127).to(torch.float32).clamp_(min=tiny)
        code = torch.div(blocks, scale).round_().clamp_(-127, 127).to(torch.int8)
        return code, scale

    @override
    def decode(self, code: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.mul(code[0].to(dtype), code[1])

    @override
    def row_bytes(self) -> int:
        return self.block + 4
