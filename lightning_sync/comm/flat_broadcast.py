"""Give all ranks one rank's tensors, a few large messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sync.comm.wire import GroupWire

_CHUNK_BYTES = 64 * 2**20


def broadcast_tensors(tensors: Sequence[Tensor], source: int, wire: GroupWire | None = None) -> None:
    """Overwrite `tensors` on every rank of the group with those of its rank `source` (collective).

    Args:
        tensors: Same shapes and dtypes on all ranks, in the same order.
        source: Rank inside the group.
        wire: The group, and how to wait for it; `None` for the default group, waiting in torch.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for group in by_dtype.values():
        for chunk in _chunks(group):
            flat = torch.cat([t.reshape(-1) for t in chunk])
            if wire is None:
                dist.broadcast(flat, source)
            else:
                wire.broadcast(flat, source)
            parts = flat.split([t.numel() for t in chunk])
            torch._foreach_copy_(chunk, [p.view(t.shape) for p, t in zip(parts, chunk, strict=True)])


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    chunks: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if chunks[-1] and size + tensor.nbytes > _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.nbytes
    return chunks
