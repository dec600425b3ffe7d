"""Rows of a few values, in 32, 16, 8 or 2 bits each: how the elements that a sparse compressor picks are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueFormat:
    """A way to send rows of values.

    Attributes:
        encode: ``[rows, k]`` in float32 or float64 to tensors of `rows` rows.
        decode: What `encode` returned, with any leading axes, k and a dtype, to ``[..., rows, k]``.
        nbytes: Bytes of a row of k values.
    """

    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[[Sequence[Tensor], int, torch.dtype], Tensor]
    nbytes: Callable[[int], int]


def _as(dtype: torch.dtype) -> ValueFormat:
    return ValueFormat(
        lambda values: (values.to(dtype),), lambda code, _, out: code[0].to(out), lambda k: k * dtype.itemsize
    )


def _encode_int8(values: Tensor) -> tuple[Tensor, ...]:
    """Symmetric, one float32 scale a row: q = round(v / s), s = max|v| / 127; inf or NaN spoil their whole row."""
    tiny = torch.finfo(torch.float32).tiny
    scale = (values.abs().amax(-1, keepdim=True) / 127).to(torch.float32).clamp_(min=tiny)
    return (values / scale).round_().to(torch.int8), scale


def _decode_int8(code: Sequence[Tensor], k: int, dtype: torch.dtype) -> Tensor:
    return code[0].to(dtype).mul_(code[1])


def _encode_2bit(values: Tensor) -> tuple[Tensor, ...]:
    """A sign and one of two magnitudes, each the mean of those it stands for, split at the mean magnitude.

    So what is decoded is the projection of the values on two vectors: its squared error is the values' squared norm
    minus its own, and its norm is at least the mean magnitude times the root of k. In a row with a zero the lower
    magnitude is 0 and stands for the zeros alone, which then stay zeros.
    """
    size = values.abs()
    has_zero = (size == 0).any(-1, keepdim=True)
    high = torch.where(has_zero, size > 0, size > size.mean(-1, keepdim=True))
    upper = torch.where(high, size, 0).sum(-1, keepdim=True) / high.sum(-1, keepdim=True).clamp_(min=1)
    lower = torch.where(high, 0, size).sum(-1, keepdim=True) / (~high).sum(-1, keepdim=True).clamp_(min=1)
    levels = torch.cat([lower, upper], -1).to(torch.float32)
    # One number of a row that is not finite makes both levels so: comparisons with NaN are false.
    levels = torch.where(size.isfinite().all(-1, keepdim=True), levels, torch.nan)
    code = high.to(torch.uint8).mul_(2).add_(values < 0)
    padded = torch.nn.functional.pad(code, (0, -code.shape[-1] % 4)).unflatten(-1, (-1, 4))
    return (padded << _shifts(padded)).sum(-1, dtype=torch.uint8), levels


def _decode_2bit(code: Sequence[Tensor], k: int, dtype: torch.dtype) -> Tensor:
    bits = ((code[0].unsqueeze(-1) >> _shifts(code[0])) & 3).flatten(-2)[..., :k].long()
    levels = code[1].to(dtype)
    return torch.stack([levels, -levels], -1).flatten(-2).gather(-1, bits)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=like.device)


FORMATS = {
    "fp32": _as(torch.float32),
    "bf16": _as(torch.bfloat16),
    "int8": ValueFormat(_encode_int8, _decode_int8, lambda k: k + 4),
    "2bit": ValueFormat(_encode_2bit, _decode_2bit, lambda k: -(-k // 4) + 8),
}
