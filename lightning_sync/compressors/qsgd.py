"""QSGD: unbiased random rounding relative to the norm of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.checks import check_choice
from lightning_sync.compressors.fused import Code, FusedCodec
from lightning_sync.compressors.integers import check_block, quantise
from lightning_sync.compressors.planes import Planes, join, peak, split, total


@dataclass(frozen=True)
class QSGD(FusedCodec):
    r"""Round to one of s levels of the block's norm at random, right on average (Alistarh et al. 2017, section 3.1).

    For a block v of d elements, s = 2^(bits-1) - 1 levels and u uniform in [0, 1):

    .. math::
        Q(v)_i = \frac{\|v\|_2}{s} \, \Bigl\lfloor \frac{s \, v_i}{\|v\|_2} + u \Bigr\rfloor

    which is the paper's :math:`\|v\|_2 \, \mathrm{sign}(v_i) \, \xi_i`. Unbiased:
    :math:`E \|Q(v) - v\|^2 \le \min(d / s^2, \sqrt d / s) \, \|v\|^2` (the paper, lemma 3.1), once on every rank and
    once more on the owner. No error feedback and no memory are needed. `BlockInt8` and `BlockInt4` with
    ``stochastic=True`` round relative to the largest magnitude instead; their errors are smaller, as that is below the
    norm.

    u comes from a private generator, a function of seed, step, rank and parameter. Codes have a fixed length, not the
    paper's Elias code: ``rows * (block * bits / 8 + 4)`` bytes with ``rows = ceil(numel / block)``, pattern
    ``"exchange"`` then ``"gather"``, so each rank sends 2 (N-1)/N of it whatever N is; with several ranks per node use
    two levels.

    Args:
        bits: 8, 4 or 2, so 127, 7 or 1 levels. Fewer: fewer bytes, more noise.
        block: Elements per norm, a multiple of 16. Larger: fewer bytes, more noise, as the bound above says.

    Raises:
        ValueError: for a value out of range.
    """

    bits: int = 4
    block: int = 512
    noisy: ClassVar[bool] = True  # type: ignore[misc]
    word: ClassVar[torch.dtype] = torch.int32

    def __post_init__(self) -> None:
        check_choice("QSGD", (8, 4, 2), bits=self.bits)
        check_block("QSGD", self.block, 16)

    @property
    @override
    def planes(self) -> int:  # type: ignore[override]
        return 32 // self.bits

    @property
    def levels(self) -> int:
        """s, the number of levels above zero."""
        return (1 << (self.bits - 1)) - 1

    @override
    def encode_planes(self, values: Planes, keys: Tensor | None) -> tuple[Code, list[Tensor]]:
        largest = peak(values).clamp(min=torch.finfo(torch.float32).tiny)  # squares of what is below 1 cannot overflow
        shares = [v / largest for v in values]
        # The root of a float32 number by way of float64 is the nearest float32 number, whoever computes it.
        root = total([v * v for v in shares]).to(torch.float32).double().sqrt().to(torch.float32)
        norm = (root * largest).to(torch.float32)
        scale = self._scale(norm, values[0].dtype)
        digits = quantise([v / scale for v in values], keys, self.levels)
        words = join(digits, self.bits, 1 << (self.bits - 1))
        return (words, norm.squeeze(1)), [d * scale for d in digits]

    @override
    def decode_planes(self, code: Code, like: Planes) -> list[Tensor]:
        scale = self._scale(code[1].unsqueeze(1), like[0].dtype)
        return [d.mul_(scale) for d in split(code[0], self.bits, like, 1 << (self.bits - 1))]

    def _scale(self, norm: Tensor, dtype: torch.dtype) -> Tensor:
        scale: Tensor = norm.to(dtype) / self.levels
        return scale.clamp(min=torch.finfo(torch.float32).tiny)
