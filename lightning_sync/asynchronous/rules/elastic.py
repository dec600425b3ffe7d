"""Elastic averaging, in its asynchronous form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_sync.asynchronous.rules.base import Contribution, Facts, Rule


@dataclass(frozen=True)
class Elastic(Rule):
    r"""The shard and the replica pull each other, and stay apart.

    With d the centre that was just read, minus the replica's parameters:

    .. math:: x \leftarrow x - \alpha d, \qquad x_i \leftarrow x_i + \alpha d

    (Zhang, Choromanska and LeCun 2015, "Deep learning with elastic averaging SGD", algorithm 1, asynchronous EASGD.)
    For deltas. The contribution's weight does not count, `alpha` does. Memory: none on the owners.

    Args:
        alpha: The pull, in (0, 1). Higher keeps replicas closer to the centre and lets them explore less; the paper
            uses 0.9 / number of replicas. Above 1 / number of replicas the centre may overshoot.
    """

    alpha: float
    pushes: ClassVar[tuple[str, ...]] = ("delta",)
    uses_weight: ClassVar[bool] = False
    reads_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 < self.alpha < 1:
            raise ValueError(f"Elastic(alpha={self.alpha!r}): expected a number above 0 and below 1.")

    @override
    def change(self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]) -> Tensor:
        """Alpha d."""
        return contribution.values * self.alpha

    @override
    def next_local(self, local: Tensor, delta: Tensor, read: Tensor) -> Tensor:
        """The replica's own parameters, pulled; what it reads only serves to measure the next delta."""
        return local + self.alpha * delta
