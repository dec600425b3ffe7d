"""Gradients as one flat tensor, without a copy where they already lie next to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 2**18


def as_flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one flat view, if they are contiguous and adjacent in one storage (a DDP bucket is)."""
    first = tensors[0]
    base, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for t in tensors:
        if not t.is_contiguous() or t.storage_offset() != end or t.untyped_storage().data_ptr() != base:
            return None
        end += t.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())


def span(tensors: Sequence[Tensor]) -> tuple[Tensor | None, tuple[int, ...]]:
    """One flat view from the first to the last element of contiguous tensors of one dtype that share their storage.

    Unlike `as_flat` the tensors may have others between them, whose elements are in the view as well: write only to
    places that are counted from a tensor's own start. So it is with the matrices in a DDP bucket.

    Returns:
        The view, and where in it each tensor starts; `None` and nothing if there is no such view.
    """
    first = tensors[0]
    base = first.untyped_storage().data_ptr()
    for t in tensors:
        if not t.is_contiguous() or t.dtype != first.dtype or t.untyped_storage().data_ptr() != base:
            return None, ()
    starts = [int(t.storage_offset()) for t in tensors]
    low = min(starts)
    size = max(start + t.numel() for start, t in zip(starts, tensors, strict=True)) - low
    return first.as_strided((size,), (1,), low), tuple(start - low for start in starts)


def flatten(tensors: Sequence[Tensor], scale: float, dtype: torch.dtype | None = None) -> Tensor:
    """One flat tensor, `scale` times the tensors, multiplied in their own precision and then cast to `dtype`.

    Multiplying before the cast matters in float16, whose largest number is 65504. The tensors may be overwritten.
    """
    dtype = dtype or tensors[0].dtype
    flat = as_flat(tensors)
    if flat is None:
        flat = torch.cat([t.reshape(-1) for t in tensors])
    if dtype == flat.dtype or flat.device.type != "cpu":
        return flat.mul_(scale).to(dtype)
    # In pieces, so that a product is still in the cache when it is cast. One multiplication that casts takes twice as
    # long as both.
    out = torch.empty(len(flat), dtype=dtype)
    for piece, cast in zip(flat.split(_PIECE), out.split(_PIECE), strict=True):
        cast.copy_(piece.mul_(scale))
    return out


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Write `flat` into the tensors, in order, casting to their dtype; returns the tensors."""
    target = as_flat(tensors)
    if target is not None:
        target.copy_(flat)
    else:
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_(list(tensors), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])
    return tensors
