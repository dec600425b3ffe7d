"""Steps of a rank that has no data: it takes part in what the others do, and learns nothing by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def loss_of_nothing(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """A loss of 0 whose gradient is exactly 0 for these parameters, whatever they hold, and missing for all others."""
    loss = torch.zeros((), device=device, requires_grad=True)
    for p in parameters:
        loss = loss + p.unsqueeze(0)[:0].sum().to(loss.dtype)
    return loss


def forward_of_nothing(model: DistributedDataParallel, module: nn.Module, used: Sequence[nn.Parameter]) -> Tensor:
    """DDP's forward, with all that it does between ranks, around a module that looks at nothing.

    No layer runs: statistics of BatchNorm and random numbers stay as they are.

    Args:
        model: The wrapped model.
        module: What it wraps.
        used: Parameters that shall get a gradient (of 0).
    """
    original = module.forward

    def forward(_: Any) -> Tensor:
        module.forward = original
        return loss_of_nothing(used, next(module.parameters()).device)

    module.forward = forward
    loss: Tensor = model(None)  # one argument: DDP on CUDA counts on it
    return loss


def parameters_to_touch(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Parameters whose gradients DDP waits for; call before gradients are zeroed.

    Where DDP looks for unused ones, one is enough, and more would turn "no gradient" into "a gradient of zero", which
    optimisers act on: one of those that had a gradient in the last step. With a static graph it is all of those.
    """
    trained = [p for p in model.module.parameters() if p.requires_grad]
    used = [p for p in trained if p.grad is not None]
    if model.static_graph:
        return used or trained
    return (used or trained)[:1] if model.find_unused_parameters else trained
