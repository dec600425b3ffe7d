"""Clipping one rank's own gradient, before it meets the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sync.weights import Weight


def clip_(tensors: Sequence[Tensor], max_norm: float, unit: Weight = 1.0) -> None:
    r"""Scale all tensors by :math:`\min(1, c / (\|u g\| + 10^{-6}))`, in place, as torch clips by a global norm.

    The host does not stop. A norm that is inf or NaN makes everything zero or NaN: look before.

    Args:
        tensors: g, all of this rank's gradients.
        max_norm: c.
        unit: u, what they have to be multiplied by to be in the units of `max_norm`.
    """
    if not tensors:
        return
    wide = torch.promote_types(torch.float32, tensors[0].dtype)
    norms = torch._foreach_norm(list(tensors), 2, dtype=wide)
    norm = torch.linalg.vector_norm(torch.stack(norms)) * unit
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {t.dtype for t in tensors}:
        torch._foreach_mul_([t for t in tensors if t.dtype == dtype], factor.to(dtype))
