"""Buffers of several replicas become one set: running statistics by their mean, counts by their maximum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_sync.comm.flat_broadcast import broadcast_tensors
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors.base import Payload
from lightning_sync.state import canonical_name

BufferPolicy = Literal["average", "rank0"]


class BufferMerge:
    r"""Combines the buffers of all ranks of a group.

    ``"average"``: floating-point buffers become their mean, integers and booleans their maximum. The variance of a
    BatchNorm gets the variance *between* the ranks' means as well:

    .. math:: v = \tfrac1N \sum_r (v_r + m_r^2) - m^2, \qquad m = \tfrac1N \sum_r m_r

    (With weights, each rank's share of them stands for 1/N.)

    ``"rank0"``: everyone takes over the first rank's.

    Args:
        module: Its buffers, by name without wrappers' prefixes.
        policy: See above.
    """

    def __init__(self, module: nn.Module, policy: BufferPolicy = "average") -> None:
        if policy not in ("average", "rank0"):
            raise ValueError(f"buffers={policy!r}: expected 'average' or 'rank0'.")
        self.policy = policy
        self._module = module
        buffers = self.buffers
        self._floats = [n for n, b in buffers.items() if b.is_floating_point()]
        self._counts = [n for n, b in buffers.items() if not b.is_floating_point() and not b.is_complex()]
        self._means: dict[str, str] = {}  # variance -> mean
        for name, part in module.named_modules():
            if isinstance(getattr(part, "running_var", None), Tensor):
                prefix = canonical_name(f"{name}." if name else "")
                self._means[f"{prefix}running_var"] = f"{prefix}running_mean"

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers as they are now: assigning to one puts another tensor in its place."""
        return {canonical_name(name): b for name, b in self._module.named_buffers()}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the buffers as they are now, to be merged while the model goes on."""
        return {name: b.detach().clone() for name, b in self.buffers.items()}

    def merge(
        self, values: Mapping[str, Tensor], wire: GroupWire, part: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        """What the ranks' `values` become, the same bits on all ranks (collective).

        Args:
            values: This rank's.
            wire: The group.
            part: This rank's weight over the sum of all; `None`: 1/N.
        """
        if not values or wire.size == 1:
            return dict(values)
        if self.policy == "rank0":
            merged = {name: value.clone() for name, value in values.items()}
            broadcast_tensors(list(merged.values()), source=0, wire=wire)
            return merged
        merged = dict(values)
        merged.update(self._mean(values, wire, part))
        if self._counts:
            # Maxima of counts, such as BatchNorm's number of batches.
            flat = torch.cat([values[n].reshape(-1).to(torch.int64) for n in self._counts])
            wire.maximum(flat)
            parts = flat.split([values[n].numel() for n in self._counts])
            merged.update(
                {n: p.view(values[n].shape).to(values[n].dtype) for n, p in zip(self._counts, parts, strict=True)}
            )
        return merged

    def _mean(self, values: Mapping[str, Tensor], wire: GroupWire, part: float | Tensor | None) -> dict[str, Tensor]:
        if not self._floats:
            return {}
        # float64: a variance is a small difference of squares. Devices without it take float32.
        wide = torch.float32 if next(iter(values.values())).device.type == "mps" else torch.float64
        rows = {n: values[n].to(wide) for n in self._floats}
        for variance, mean in self._means.items():
            if variance in rows and mean in rows:
                rows[variance] = rows[variance] + rows[mean].square()
        flat = torch.cat([rows[n].reshape(-1) for n in self._floats])
        flat = flat.div_(wire.size) if part is None else flat.mul_(part)
        wire.round([Payload("sum", (flat,))])
        parts = flat.split([values[n].numel() for n in self._floats])
        means = {n: p.view(values[n].shape) for n, p in zip(self._floats, parts, strict=True)}
        for variance, mean in self._means.items():
            if variance in means and mean in means:
                means[variance] = (means[variance] - means[mean].square()).clamp_(min=0)
        return {n: m.to(values[n].dtype) for n, m in means.items()}

    def write(self, values: Mapping[str, Tensor], local_weight: float = 0.0) -> None:
        """Put merged values into the module; with a weight, keep that share of what floating-point buffers hold now."""
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                if name not in values:
                    continue
                if local_weight and buffer.is_floating_point():
                    buffer.lerp_(values[name].to(buffer.dtype), 1 - local_weight)
                else:
                    buffer.copy_(values[name])
