"""Steps that owners make in place of the module's optimiser: what becomes of the optimiser here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sync.asynchronous.optimizer import check_elementwise


@contextmanager
def unstepped(optimizer: Optimizer) -> Generator[None, None, None]:
    """While this is active, `optimizer` runs closures and leaves the parameters as they are."""
    step = optimizer.step
    optimizer.step = _no_step  # type: ignore[method-assign]
    optimizer._opt_called = True  # type: ignore[attr-defined] # what schedulers look at
    try:
        yield
    finally:
        optimizer.step = step  # type: ignore[method-assign]


def _no_step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    """Run the closure, in which gradients come to be and are clipped."""
    return None if closure is None else closure()


def gradients_of(params: Sequence[nn.Parameter]) -> list[Tensor]:
    """What to send: zeros for a parameter that the step did not use."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in params]


def check_gradients(optimizers: Sequence[Optimizer], scaler: Any) -> None:
    """Refuse what owners cannot do with gradients.

    Args:
        optimizers: The module's.
        scaler: A loss scaler, or `None`.

    Raises:
        ValueError: naming what is in the way.
    """
    if len(optimizers) != 1:
        raise ValueError(
            f"push='gradient' needs one optimiser, which owners apply to their shards; the module has "
            f"{len(optimizers)}. Use push='delta', which goes with any number."
        )
    if scaler is not None:
        raise ValueError(
            "push='gradient' does not go with a loss scaler (16-mixed): owners would get scaled gradients. Use "
            "bf16-mixed, or push='delta'."
        )
    check_elementwise(optimizers[0])
