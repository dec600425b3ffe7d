"""A quarter or an eighth of the bytes: small integers in blocks, each block with its own scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.checks import check_flags
from lightning_sync.compressors.fused import Code, FusedCodec
from lightning_sync.compressors.planes import Planes, join, peak, positions, split
from lightning_sync.compressors.random import uniform


class _BlockIntegers(FusedCodec):
    """What the formats have in common: q = round(x L / max|x|), L = 2^(bits-1) - 1, sent as q + 2^(bits-1)."""

    bits: ClassVar[int]
    stochastic: bool

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_block(name, self.block)
        check_flags(name, stochastic=self.stochastic)

    @property
    @override
    def biased(self) -> bool:  # type: ignore[override]
        return not self.stochastic

    @property
    @override
    def noisy(self) -> bool:  # type: ignore[override]
        return self.stochastic

    @property
    @override
    def planes(self) -> int:  # type: ignore[override]
        return 32 // self.bits

    @property
    @override
    def word(self) -> torch.dtype:
        return torch.int32

    @override
    def encode_planes(self, values: Planes, keys: Tensor | None) -> tuple[Code, list[Tensor]]:
        largest = peak(values).to(torch.float32)
        scale = _scale(largest, self.bits, values[0].dtype)
        inverse = scale.reciprocal()
        digits = quantise([v * inverse for v in values], keys, 2 ** (self.bits - 1) - 1)
        words = join(digits, self.bits, 1 << (self.bits - 1))
        return (words, largest.squeeze(1)), [d * scale for d in digits]

    @override
    def decode_planes(self, code: Code, like: Planes) -> list[Tensor]:
        scale = _scale(code[1].unsqueeze(1), self.bits, like[0].dtype)
        return [d.mul_(scale) for d in split(code[0], self.bits, like, 1 << (self.bits - 1))]


@dataclass(frozen=True)
class BlockInt8(_BlockIntegers):
    r"""Symmetric int8 quantisation with one scale per block of `block` elements.

    For a block x with m = max|x| (sent in float32): scale s = m / 127, code q = round(x / s) in [-127, 127], decoded
    value q s. The error of an element is at most s/2, that is m / 254 (6e-39 if that is less), and never more than the
    element, so :math:`\|C(x) - x\|^2 \le (1 - 1/block) \|x\|^2`, and far less in practice. Blocks of zeros decode to
    zeros; non-finite elements make their whole block non-finite, so that overflow stays visible.

    With `stochastic`, q = floor(x / s + u) with u uniform in [0, 1): unbiased, errors below s, variance of an element
    at most s^2 / 4. u comes from a private generator keyed by seed, step, rank and parameter.

    Payload: ``rows * (block + 4)`` bytes with ``rows = ceil(numel / block)`` per parameter, pattern ``"exchange"``
    then ``"gather"``: each rank sends 2 (N-1)/N of it, 0.25 of float32, whatever N is; with several ranks per node use
    two levels, else each of them sends that through the node's interface. Rounding to nearest is deterministic, hence
    biased: error feedback is wrapped around it by default, which costs one float32 per element of memory, and 1/N more
    for the blocks a rank owns.

    Args:
        block: Elements per scale, a multiple of 8. Larger: fewer bytes (4/block per element), larger errors where
            magnitudes differ.
        stochastic: Round at random, so that the mean over steps is right without error feedback and its memory, at a
            larger error in every step.

    Raises:
        ValueError: for a value out of range.
    """

    block: int = 256
    stochastic: bool = False
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class BlockInt4(_BlockIntegers):
    r"""Symmetric 4-bit quantisation, two codes to a byte, with one scale per block of `block` elements.

    For a block x with m = max|x| (sent in float32): scale s = m / 7, code q = round(x / s) in [-7, 7], decoded value
    q s. The error of an element is at most s/2 = m / 14, and never more than the element, so
    :math:`\|C(x) - x\|^2 \le (1 - 1/block) \|x\|^2`. Small elements become 0 and are sent later, by error feedback.
    Blocks of zeros decode to zeros; non-finite elements make their whole block non-finite.

    With `stochastic`, q = floor(x / s + u) with u uniform in [0, 1): unbiased, errors below s, variance of an element
    at most s^2 / 4; see `BlockInt8`.

    Payload: ``rows * (block / 2 + 4)`` bytes, 0.13 of float32 with the default block; pattern, growth and memory as
    `BlockInt8`. Biased; error feedback is wrapped around it by default, and needed.

    Args:
        block: Elements per scale, a multiple of 8. Smaller: smaller errors, more bytes (4/block per element).
        stochastic: Round at random, without error feedback and its memory, at a larger error in every step.

    Raises:
        ValueError: for a value out of range.
    """

    block: int = 256
    stochastic: bool = False
    bits: ClassVar[int] = 4


def check_block(owner: str, block: object, unit: int = 8) -> None:
    """A block is a multiple of `unit` elements, at most 65536."""
    if isinstance(block, bool) or not isinstance(block, int) or not unit <= block <= 65536 or block % unit:
        raise ValueError(
            f"{owner}(block={block!r}): block must be an integer from {unit} to 65536, and a multiple of {unit}."
        )


def quantise(values: Planes, keys: Tensor | None, top: int) -> list[Tensor]:
    """Integers in [-top, top] near `values`: the nearest, or with `keys` one of the two nearest, right on average.

    `values` may be overwritten.
    """
    if keys is None:
        return [v.round_() for v in values]
    noise = [uniform(keys, p) for p in positions(values)]
    return [v.add_(u).floor_().clamp_(-top, top) for v, u in zip(values, noise, strict=True)]


def _scale(largest: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    # None below the smallest normal number: 0/s is 0, as it must be.
    scale: Tensor = largest.to(dtype) / (2 ** (bits - 1) - 1)
    return scale.clamp(min=torch.finfo(torch.float32).tiny)
