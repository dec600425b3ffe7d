"""Outer optimisers: what the combined difference between the anchor and the replicas does to the anchor.

An outer optimiser is any torch optimiser over the anchor's tensors, whose gradient is the combined delta. A factory
makes it: a class of this module, or any function from a list of tensors to a `torch.optim.Optimizer`, such as
``functools.partial(torch.optim.Adam, lr=1e-3)`` (in YAML a ``_target_`` with ``_partial_: true``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sync.checks import check_positive


class OuterOptimizer(ABC):
    """Makes an optimiser over the anchor's tensors; a frozen dataclass of its constants."""

    @abstractmethod
    def __call__(self, tensors: list[Tensor]) -> Optimizer:
        """Make the optimiser."""


OuterFactory = OuterOptimizer | Callable[[Any], Optimizer]


def averaging(tensors: list[Tensor]) -> Optimizer:
    """No outer optimiser: the anchor becomes the mean of the replicas, a - 1 d."""
    return torch.optim.SGD(tensors, lr=1.0)


@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    r"""SGD with Nesterov momentum on the anchor, as in DiLoCo.

    With d the mean of anchor minus parameters over the replicas:

    .. math:: m \leftarrow \mu m + d, \qquad a \leftarrow a - \eta (d + \mu m)

    (Douillard et al. 2023, "DiLoCo", algorithm 1, with the constants of its section 3.)

    Args:
        lr: eta. 1 with momentum 0 is averaging. Lower is safer after long periods.
        momentum: mu in [0, 1). Higher smooths over more exchanges, and needs more of them to pay off.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_positive("Nesterov", lr=self.lr)
        _check_momentum(self, self.momentum)

    def __call__(self, tensors: list[Tensor]) -> Optimizer:
        """Make the optimiser."""
        return torch.optim.SGD(tensors, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)


@dataclass(frozen=True)
class SlowMo(OuterOptimizer):
    r"""Slow momentum on the anchor.

    With gamma the inner learning rate at the exchange and d as in `Nesterov`:

    .. math:: u \leftarrow \beta u + d / \gamma, \qquad a \leftarrow a - \alpha \gamma u

    (Wang et al. 2020, "SlowMo", equations 2 and 3.) Where gamma is 0, nothing was learned: the anchor becomes the mean.

    Args:
        lr: alpha. With 1 and momentum 0 this is averaging.
        momentum: beta in [0, 1); the paper uses 0.4 to 0.8, more for more replicas.
    """

    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        check_positive("SlowMo", lr=self.lr)
        _check_momentum(self, self.momentum)

    def __call__(self, tensors: list[Tensor]) -> Optimizer:
        """Make the optimiser."""
        return SlowMoOptimizer(tensors, self.lr, self.momentum)


class SlowMoOptimizer(Optimizer):
    """The optimiser that `SlowMo` makes. `inner_lr` in its parameter groups is set before every step."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "inner_lr": 1.0})

    @override
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all tensors that have a gradient."""
        for group in self.param_groups:
            tensors = [p for p in group["params"] if p.grad is not None]
            deltas = [p.grad for p in tensors]
            gamma, alpha, beta = group["inner_lr"], group["lr"], group["momentum"]
            if gamma <= 0:
                torch._foreach_sub_(tensors, deltas)
                continue
            for p in tensors:
                if not self.state[p]:
                    self.state[p]["slow_momentum"] = torch.zeros_like(p)
            slow = [self.state[p]["slow_momentum"] for p in tensors]
            torch._foreach_mul_(slow, beta)
            torch._foreach_add_(slow, deltas, alpha=1 / gamma)
            torch._foreach_add_(tensors, slow, alpha=-alpha * gamma)


def _check_momentum(owner: object, momentum: float) -> None:
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise ValueError(f"{type(owner).__name__}(momentum={momentum!r}): expected a number in [0, 1).")


def _is_class_of_ours(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, OuterOptimizer)


def build_outer(factory: OuterFactory | None, tensors: list[Tensor]) -> Optimizer:
    """The outer optimiser over these tensors.

    Raises:
        ValueError: if `factory` is not callable, fails, or makes something else.
    """
    make = averaging if factory is None else factory
    if not callable(make) or _is_class_of_ours(make):
        raise ValueError(
            f"outer_optimizer={factory!r}: expected None (averaging), Nesterov(), SlowMo(), or a function that makes a "
            "torch optimiser from a list of tensors, such as functools.partial(torch.optim.SGD, lr=0.7)."
        )
    try:
        optimizer = make(tensors)
    except Exception as error:
        raise ValueError(f"outer_optimizer={factory!r} does not make an optimiser: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"outer_optimizer={factory!r} made a {type(optimizer).__name__}, not a torch optimiser.")
    return optimizer


def steps_apart(optimizer: Optimizer) -> bool:
    """Whether a step of some tensors and one of the others make a step of all: every state is a tensor's own.

    So it is in this module and in torch, LBFGS aside. Others may count steps or take norms over all tensors.
    """
    module = type(optimizer).__module__
    return module == __name__ or (module.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS))
