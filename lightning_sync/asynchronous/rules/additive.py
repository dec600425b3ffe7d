"""Rules that scale a contribution and apply it at once. They keep nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_sync.asynchronous.rules.base import Contribution, Facts, Rule


@dataclass(frozen=True)
class Add(Rule):
    r"""Every contribution counts in full, whenever it arrives.

    .. math:: x \leftarrow x - w d

    With deltas and w = 1, the classic parameter server (Li et al. 2014, "Scaling distributed machine learning with the
    parameter server", algorithm 1); with gradients and an optimiser, Downpour SGD (Dean et al. 2012, "Large scale
    distributed deep networks", section 4.1). For deltas and gradients. Memory: none.
    """

    @override
    def change(self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]) -> Tensor:
        """W d."""
        return contribution.values * contribution.weight


@dataclass(frozen=True)
class InverseStaleness(Rule):
    r"""The staler a contribution, the less it counts.

    .. math:: x \leftarrow x - \frac{w}{1 + \tau} d

    with tau the versions that were made since the sender read the shard. Zhang, Gupta, Lian and Liu 2016,
    "Staleness-aware async-SGD for distributed deep learning", equation 6, divide the learning rate by their staleness,
    which starts at 1. For deltas and gradients; an optimiser that normalises gradients, as Adam does, undoes most.
    With N equal replicas tau is about N - 1, so everything counts about 1/N: use weight 1. Memory: none.
    """

    @override
    def change(self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]) -> Tensor:
        """W d / (1 + tau)."""
        return contribution.values * (contribution.weight / (1 + facts.staleness))
