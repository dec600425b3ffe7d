"""A quarter of the bytes: 8-bit floats in blocks, each scaled to the format's range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.compressors.fused import Code, FusedCodec
from lightning_sync.compressors.integers import check_block
from lightning_sync.compressors.planes import Planes, join, peak, split

_TOP = 448.0
"""Largest number of e4m3."""
_LOWEST = 127 - 6
"""Exponent of its smallest normal number, 2^-6, as float32 writes it."""


@dataclass(frozen=True)
class FP8(FusedCodec):
    r"""Floats of 8 bits (e4m3: 4 of exponent, 3 of mantissa) with one scale per block of `block` elements.

    For a block x with m = max|x| (sent in float32) and s = m / 448: code e4m3(x / s), decoded value s times that. The
    relative error of an element is at most 2^-4 down to m / 28672, where `BlockInt8` has an absolute one of m / 254:
    small elements next to large ones survive, large ones are coarser. Below that it is at most m 2^-10 / 448, and never
    more than the element, so :math:`\|C(x) - x\|^2 \le (2^{-8} + 10^{-11} block) \|x\|^2`. Blocks of zeros decode to
    zeros; non-finite elements make their whole block non-finite, so that overflow stays visible.

    Payload: ``rows * (block + 4)`` bytes with ``rows = ceil(numel / block)``, sent as integers, since gloo refuses
    float8; pattern ``"exchange"`` then ``"gather"``: each rank sends 2 (N-1)/N of it, 0.25 of float32, whatever N is;
    with several ranks per node use two levels. Biased (rounding to nearest): error feedback is wrapped around it by
    default, one float32 per element of memory, and 1/N more for the blocks a rank owns.

    Args:
        block: Elements per scale, a multiple of 8. Larger: fewer bytes (4/block per element); errors hardly change.

    Raises:
        ValueError: for a block out of range.
    """

    block: int = 256
    biased: ClassVar[bool] = True
    planes: ClassVar[int] = 4  # type: ignore[misc]
    word: ClassVar[torch.dtype] = torch.int32

    def __post_init__(self) -> None:
        check_block("FP8", self.block)

    @override
    def encode_planes(self, values: Planes, keys: Tensor | None) -> tuple[Code, list[Tensor]]:
        largest = peak(values).to(torch.float32)
        scale = _scale(largest)
        codes = [to_e4m3(v.to(torch.float32) / scale) for v in values]
        words = join([c.to(torch.float32) for c in codes], 8)
        return (words, largest.squeeze(1)), [(from_e4m3(c) * scale).to(values[0].dtype) for c in codes]

    @override
    def decode_planes(self, code: Code, like: Planes) -> list[Tensor]:
        scale = _scale(code[1].unsqueeze(1))
        codes = split(code[0], 8, like)
        return [(from_e4m3(c.to(torch.int32)) * scale).to(like[0].dtype) for c in codes]


def to_e4m3(values: Tensor) -> Tensor:
    r"""The nearest e4m3 number to float32 `values` in [-448, 448], ties to even, as its bits, int32.

    In integers and powers of two, which processors have vector instructions for, unlike the format itself. With
    :math:`2^e` the largest power of two that is not above \|v\|, or 2^-6 if that is larger: the bits are 8 (e + 6) plus
    \|v\| in units of 2^(e-3), rounded.
    """
    size = values.abs()
    exponent = (size.view(torch.int32) >> 23).clamp(min=_LOWEST)
    mantissa = (size * power_of_two(127 + 3 + 127 - exponent)).round().to(torch.int32)
    return ((exponent - _LOWEST) << 3) + mantissa + ((values < 0).to(torch.int32) << 7)


def from_e4m3(code: Tensor) -> Tensor:
    """The number whose e4m3 bits are `code`, int32; float32."""
    exponent = (code >> 3) & 15
    mantissa = (code & 7) + ((exponent > 0).to(torch.int32) << 3)
    size = mantissa.to(torch.float32) * power_of_two(exponent.clamp(min=1) + (127 - 10))
    return torch.where(code >= 128, -size, size)


def power_of_two(exponent: Tensor) -> Tensor:
    """2 to the power of `exponent` - 127, float32; from 1 to 254."""
    return (exponent << 23).view(torch.float32)


def _scale(largest: Tensor) -> Tensor:
    scale: Tensor = largest / _TOP
    return scale.clamp(min=torch.finfo(torch.float32).tiny)
