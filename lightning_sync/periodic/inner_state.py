"""What becomes of the inner optimisers' state when replicas have met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors.base import Payload

InnerPolicy = Literal["keep", "average", "reset"]
POLICIES = ("keep", "average", "reset")


def averageable(optimizers: Iterable[Optimizer], params: Iterable[Tensor]) -> list[Tensor]:
    """Moments and the like of these parameters, in one order on all ranks; not counts, which have no dimensions."""
    wanted = list(params)
    found: list[Tensor] = []
    for optimizer in optimizers:
        for p in wanted:
            state = optimizer.state.get(p, {})
            values = (state[kind] for kind in sorted(state))
            found += [v for v in values if isinstance(v, Tensor) and v.dim() > 0 and v.is_floating_point()]
    return found


def average(tensors: Sequence[Tensor], wire: GroupWire) -> None:
    """Replace them by their means over the ranks (collective).

    Raises:
        ValueError: if ranks do not hold the same number of elements, because some never used a parameter.
    """
    elements = sum(t.numel() for t in tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    most, least = wire.maximum(torch.tensor([elements, -elements], device=device)).tolist()
    if most != -least:
        raise ValueError(
            f"inner_state='average': this rank's optimisers hold {elements:,} elements of state, others between "
            f"{-least:,} and {most:,}, since ranks have used different parameters. Use inner_state='keep' or 'reset'."
        )
    if tensors and wire.size > 1:
        with torch.no_grad():
            torch._foreach_div_(list(tensors), wire.size)
            wire.round([Payload("sum", tuple(tensors))])


def reset(optimizers: Iterable[Optimizer], params: Iterable[Tensor]) -> None:
    """Forget everything about these parameters, as if the optimiser had just been made."""
    wanted = list(params)
    for optimizer in optimizers:
        for p in wanted:
            optimizer.state.pop(p, None)
