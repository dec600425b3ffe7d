"""What a slice of a vector is on the wire between two ranks: the package's number formats, one sender, one reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.compressors import BF16, FP16, Compressor, Exact, Route
from lightning_sync.compressors.blocks import BlockCodec
from lightning_sync.compressors.feedback import ErrorFeedback


class Codec(ABC):
    """Turns float32 `[n]` into bytes and back, without state.

    Attributes:
        exact: Whether nothing is lost, so that no residual is needed.
        alignment: Slices must be multiples of this long.
    """

    exact: bool = False
    alignment: int = 1

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes for that many elements."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """`[n]` as bytes: uint8 `[nbytes(n)]`, contiguous, perhaps the same memory."""

    @abstractmethod
    def decode(self, code: Tensor, into: Tensor) -> None:
        """Write what was sent into `into`, float32 `[n]`."""


class CastCodec(Codec):
    """Elements in a floating-point format: float32 (exact), bfloat16, float16."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self.exact = dtype == torch.float32

    @override
    def nbytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    @override
    def encode(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).view(torch.uint8)

    @override
    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(self._dtype))


EXACT = CastCodec()


class RowCodec(Codec):
    """Blocks of one of the package's block formats, such as `BlockInt8`; deterministic rounding only."""

    def __init__(self, rows: BlockCodec) -> None:
        self._rows = rows
        self._block = rows.block
        self.alignment = self._block

    @override
    def nbytes(self, numel: int) -> int:
        return numel // self._block * self._rows.row_bytes()

    @override
    def encode(self, values: Tensor) -> Tensor:
        if not values.numel():
            return values.view(torch.uint8)
        parts = self._rows.encode(values.view(-1, self._block).clone())
        return torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])

    @override
    def decode(self, code: Tensor, into: Tensor) -> None:
        if not into.numel():
            return
        like = self._rows.encode(torch.zeros(1, self._block))  # dtypes and widths of the parts of one row
        count, start, parts = into.numel() // self._block, 0, []
        for part in like:
            length = count * part.nbytes
            raw = code[start : start + length].clone()  # parts begin at any byte; views of wider types must not
            parts.append(raw.view(part.dtype).view(count, *part.shape[1:]))
            start += length
        into.copy_(self._rows.decode(parts, torch.float32).reshape(-1))


def codec_for(compressor: Compressor | Route) -> Codec:
    """The number format of a compressor, for one sender and one reader.

    Raises:
        ValueError: for one that only exists between all ranks (PowerSGD's factors are sums) or needs more state.
    """
    bare: Any = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
    if isinstance(bare, Exact):
        return CastCodec()
    if isinstance(bare, (BF16, FP16)):
        return CastCodec(torch.bfloat16 if isinstance(bare, BF16) else torch.float16)
    if isinstance(bare, BlockCodec) and bare.remembers and not getattr(bare, "noisy", False):
        return RowCodec(bare)
    raise ValueError(
        f"compressor={compressor!r} does not go with asynchronous exchanges, which have one sender and one reader. Use "
        "none, bf16, fp16, or a format of blocks that keeps what it leaves out: int8, int4, fp8, sign, topk."
    )


def as_bytes(buffer: Any) -> Tensor:
    """A copy of a buffer that was received, uint8 `[n]`."""
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.uint8).copy())
