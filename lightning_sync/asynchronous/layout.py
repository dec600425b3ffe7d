"""The trained parameters as one vector of float32, cut into one contiguous slice per owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sync.state import ParamSpec


class FlatLayout:
    """Where each parameter lies in the vector, and where the owners' slices begin.

    Every parameter begins at a multiple of `alignment`, and so does every slice: blocks that a compressor makes of a
    slice never hold elements of two parameters. What lies between is zero and stays zero.

    Args:
        params: The parameters, in registration order.
        owners: How many slices, about equally long; the last ones may be shorter, or empty.
        alignment: Elements. Larger wastes more with many small parameters.
    """

    def __init__(self, params: Sequence[ParamSpec], owners: int, alignment: int = 1) -> None:
        self.params = list(params)
        self.starts: list[int] = []
        end = 0
        for param in self.params:
            self.starts.append(end)
            end += -(-param.numel // alignment) * alignment
        self.size = end
        step = -(-end // (owners * alignment)) * alignment
        self.slices = [(min(end, r * step), min(end, (r + 1) * step)) for r in range(owners)]

    def zeros(self, device: torch.device | None = None) -> Tensor:
        """A vector `[size]`, float32; pinned where it will be copied to and from a CUDA device."""
        pinned = device is not None and device.type == "cuda"
        return torch.zeros(self.size, dtype=torch.float32, pin_memory=pinned)

    @torch.no_grad()
    def gather(self, tensors: Sequence[Tensor], into: Tensor) -> Tensor:
        """Write the tensors into the vector."""
        for place, tensor in zip(self.views(into), tensors, strict=True):
            place.copy_(tensor)
        return into

    @torch.no_grad()
    def scatter(self, vector: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the vector into the tensors."""
        for place, tensor in zip(self.views(vector), tensors, strict=True):
            tensor.copy_(place)

    @torch.no_grad()
    def add(self, vector: Tensor, tensors: Sequence[Tensor]) -> None:
        """Add the vector to the tensors."""
        for place, tensor in zip(self.views(vector), tensors, strict=True):
            tensor.add_(place.to(tensor.device, tensor.dtype))

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parameters' parts of the vector, in their shapes."""
        return [
            vector[start : start + p.numel].view(p.shape) for p, start in zip(self.params, self.starts, strict=True)
        ]

    def stretches(self, bounds: tuple[int, int], groups: Sequence[int]) -> list[tuple[int, int, int]]:
        """What a slice consists of, as (start, stop, group), counted from its beginning; what lies between counts too.

        Args:
            bounds: The slice.
            groups: For every parameter, the group it belongs to.
        """
        a, b = bounds
        ends = [*self.starts[1:], self.size]
        found = []
        for start, end, group in zip(self.starts, ends, groups, strict=True):
            low, high = max(a, start), min(b, end)
            if low < high:
                found.append((low - a, high - a, group))
        return found

    def name_at(self, place: int) -> str:
        """The parameter that this element of the vector belongs to."""
        return next(
            p.name for p, start in zip(reversed(self.params), reversed(self.starts), strict=True) if start <= place
        )

    def parts(self, vector: Tensor) -> list[Tensor]:
        """The owners' slices of the vector."""
        return [vector[a:b] for a, b in self.slices]
