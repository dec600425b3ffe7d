"""Delay compensation: a first-order guess of what a stale gradient would be now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.asynchronous.rules.base import Contribution, Facts, Rule
from lightning_sync.checks import check_flags, check_positive

_EPSILON = 1e-7


@dataclass(frozen=True)
class DelayCompensated(Rule):
    r"""Correct a contribution for the distance the shard has moved since its sender read it.

    .. math:: x \leftarrow x - w \left(g + \lambda\, g \odot g \odot (x - x_{read})\right)

    (Zheng et al. 2017, "Asynchronous stochastic gradient descent with delay compensation", equation 10 and
    algorithm 2.) g * g stands for the diagonal of the Hessian, which is sensible for losses that are likelihoods.
    With `adaptive`, their DC-ASGD-a, section 6,

    .. math:: v \leftarrow m v + (1 - m)\, g \odot g, \qquad \lambda_t = \lambda / \sqrt{v + 10^{-7}}

    For gradients. For deltas only if the replicas use SGD without momentum and exchange every step: a delta is then
    eta g, and lambda takes the value lambda / eta (with `adaptive` it stays lambda, but for the 1e-7). Any other delta
    is no gradient and its square no curvature.

    Memory: on the owners, 4 bytes per parameter and replica for what each has read (more while several of its
    contributions are under way), and 4 per parameter with `adaptive`.

    Args:
        lam: lambda. Higher corrects more; 0 is `Add`. The paper uses 0.04 (constant) and 2 (adaptive) on CIFAR-10.
        adaptive: Whether lambda is divided by the gradients' root mean square.
        decay: m in [0, 1), with `adaptive`. Higher averages over more contributions; the paper uses 0.95 on CIFAR-10
            and 0 on ImageNet.
    """

    lam: float = 2.0
    adaptive: bool = True
    decay: float = 0.95
    needs_backup: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lam != 0 or isinstance(self.lam, bool):
            check_positive("DelayCompensated", lam=self.lam)
        check_flags("DelayCompensated", adaptive=self.adaptive)
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 <= self.decay < 1:
            raise ValueError(f"DelayCompensated(decay={self.decay!r}): expected a number in [0, 1).")

    @override
    def init(self, values: Tensor) -> dict[str, Tensor]:
        """`mean_square` `[n]`, if adaptive."""
        return {"mean_square": torch.zeros_like(values)} if self.adaptive else {}

    @override
    def change(self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]) -> Tensor:
        """The compensated contribution, times w."""
        assert facts.read_values is not None
        g = contribution.values
        correction = (values - facts.read_values).mul_(g).mul_(g)
        if self.adaptive:
            mean_square = state["mean_square"].mul_(self.decay).addcmul_(g, g, value=1 - self.decay)
            correction.div_((mean_square + _EPSILON).sqrt_())
        return correction.mul_(self.lam).add_(g).mul_(contribution.weight)
