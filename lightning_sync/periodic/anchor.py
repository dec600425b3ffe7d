"""The anchor: the parameters that all replicas last agreed on, in float32 or wider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_sync.state import ParamSpec

#: Uncompressed bytes of what is encoded and sent at once.
BUCKET_BYTES = 4 * 2**20


class Fragment:
    """The anchor of some parameters: contiguous, with a view per parameter.

    Args:
        members: The parameters, by spec.
        device: Where the anchor lives; the parameters may live elsewhere.

    Attributes:
        names: Parameter names.
        specs: What a reducer is told of the deltas: these names and shapes, in the anchor's dtype.
        anchor: One tensor per parameter, to be changed by an outer optimiser.
        buckets: Places of the parameters that travel together: small enough that some are encoded while others travel.
    """

    def __init__(self, members: Sequence[tuple[ParamSpec, nn.Parameter]], device: torch.device) -> None:
        dtype = torch.float32
        for spec, _ in members:
            dtype = torch.promote_types(dtype, spec.dtype)
        self.params: list[Tensor] = [p for _, p in members]
        self.names = [spec.name for spec, _ in members]
        self.specs = [replace(s, dtype=dtype, device=device) for s, _ in members]
        self.numel = sum(s.numel for s in self.specs)
        self.buckets = _buckets([s.numel * dtype.itemsize for s in self.specs])
        ends = list(accumulate((s.numel for s in self.specs), initial=0))
        self._spans = [(ends[b[0]], ends[b[-1] + 1]) for b in self.buckets]
        pinned = device.type == "cpu" and any(p.device.type == "cuda" for p in self.params)
        self.flat = torch.zeros(self.numel, dtype=dtype, device=device, pin_memory=pinned)
        # One view per parameter, not one flat tensor, for outer optimisers that look at shapes or norms of layers.
        self.anchor: list[Tensor] = [nn.Parameter(view, requires_grad=False) for view in self.views(self.flat)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """`flat` as one tensor per parameter, in its shape."""
        parts = flat[: self.numel].split([s.numel for s in self.specs])
        return [part.view(s.shape) for part, s in zip(parts, self.specs, strict=True)]

    @torch.no_grad()
    def capture(self) -> None:
        """Make the parameters, as they are now, the anchor."""
        torch._foreach_copy_(self.anchor, self.params)

    @torch.no_grad()
    def snapshot(self, buffer: Tensor) -> list[Tensor]:
        """Copy the parameters into `buffer`; returns one view per parameter."""
        views = self.views(buffer)
        torch._foreach_copy_(views, self.params)
        return views

    @torch.no_grad()
    def subtract(self, buffer: Tensor, bucket: int) -> None:
        """Turn a bucket's parameters in `buffer` into differences: anchor minus parameters."""
        start, end = self._spans[bucket]
        torch.sub(self.flat[start:end], buffer[start:end], out=buffer[start:end])

    @torch.no_grad()
    def merge(self, local_weight: float) -> None:
        r"""Take the anchor over: :math:`w \leftarrow \lambda w + (1 - \lambda) a`."""
        if local_weight >= 1:
            return
        if local_weight <= 0:
            torch._foreach_copy_(self.params, self.anchor)
            return
        ours = [a.to(device=p.device, dtype=p.dtype) for a, p in zip(self.anchor, self.params, strict=True)]
        torch._foreach_lerp_(self.params, ours, 1 - local_weight)

    @torch.no_grad()
    def pull(self, rate: float) -> None:
        r"""Move the parameters towards the anchor: :math:`w \leftarrow w + rate \, (a - w)` (elastic averaging)."""
        ours = [a.to(device=p.device, dtype=p.dtype) for a, p in zip(self.anchor, self.params, strict=True)]
        torch._foreach_lerp_(self.params, ours, rate)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the anchor by parameter name."""
        return {name: a.detach().clone() for name, a in zip(self.names, self.anchor, strict=True)}

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: for missing names or other shapes; then nothing is changed.
        """
        for name, anchor in zip(self.names, self.anchor, strict=True):
            if name not in values or values[name].shape != anchor.shape:
                shape = tuple(values[name].shape) if name in values else "nothing"
                raise ValueError(f"the anchor of {name!r} is of shape {tuple(anchor.shape)}, the saved one is {shape}.")
        with torch.no_grad():
            for name, anchor in zip(self.names, self.anchor, strict=True):
                anchor.copy_(values[name])


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    filled = 0
    for place, nbytes in enumerate(sizes):
        if buckets[-1] and filled + nbytes > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(place)
        filled += nbytes
    return buckets
