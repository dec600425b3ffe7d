"""Delayed Nesterov momentum, for asynchronous DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.asynchronous.rules.base import Contribution, Facts, Rule
from lightning_sync.checks import check_integer, check_positive


@dataclass(frozen=True)
class DelayedNesterov(Rule):
    r"""Contributions act at once, momentum only once for every `period` of them.

    With w = 1 / number of replicas and P the period, for the t-th contribution (from 1):

    .. math:: \Delta &\leftarrow \Delta + w d \\
              t \bmod P \ne 0: \quad x &\leftarrow x - \eta\,(w d + c \mu m) \\
              t \bmod P = 0: \quad m &\leftarrow \mu m + \Delta,\ \Delta \leftarrow 0, \quad
              x \leftarrow x - \eta\,(w d + (1 - c P + c) \mu m)

    (Liu et al. 2024, "Asynchronous Local-SGD training for language modeling", algorithm 3.) Momentum applied at every
    arrival, as an outer optimiser under `Add` does, is decayed P times per round and pushes every stale contribution P
    times on: that is what made their naive version worse than synchronous DiLoCo. P contributions of a synchronous
    round make one step of DiLoCo's Nesterov.

    For deltas. Memory: 8 bytes per parameter on the owners (m and Delta).

    Args:
        lr: eta.
        momentum: mu in [0, 1). Higher smooths over more rounds.
        period: P; `None`: the number of replicas.
        activation: c in [0, 1/P]: how much of the momentum acts at once and not with the round; 0 by default, as there.
    """

    lr: float = 0.7
    momentum: float = 0.9
    period: int | None = None
    activation: float = 0.0
    pushes: ClassVar[tuple[str, ...]] = ("delta",)

    def __post_init__(self) -> None:
        check_positive("DelayedNesterov", lr=self.lr)
        if self.period is not None:
            check_integer("DelayedNesterov", 1, period=self.period)
        period = self.period or 1
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, (int, float)) or not 0 <= self.momentum < 1:
            raise ValueError(f"DelayedNesterov(momentum={self.momentum!r}): expected a number in [0, 1).")
        c = self.activation
        if isinstance(c, bool) or not isinstance(c, (int, float)) or not 0 <= c <= 1 / period:
            raise ValueError(
                f"DelayedNesterov(activation={c!r}): expected a number in [0, 1/period] = [0, {1 / period:g}]."
            )

    @override
    def for_replicas(self, replicas: int) -> DelayedNesterov:
        """With P, if it was left open."""
        return replace(self, period=replicas) if self.period is None else self

    @override
    def init(self, values: Tensor) -> dict[str, Tensor]:
        """`momentum` and `buffer`, `[n]`, and how many contributions the buffer holds, `count`."""
        return {
            "momentum": torch.zeros_like(values),
            "buffer": torch.zeros_like(values),
            "count": torch.zeros((), dtype=torch.int64),
        }

    @override
    def change(self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]) -> Tensor:
        """The step, eta included."""
        d = contribution.values * contribution.weight
        if self.period is None:
            raise ValueError(f"{self!r}: the period is open; use for_replicas().")
        buffer, momentum = state["buffer"].add_(d), state["momentum"]
        state["count"] += 1
        share = self.activation
        if int(state["count"]) == self.period:  # a number on the host, no device to wait for
            momentum.mul_(self.momentum).add_(buffer)
            buffer.zero_()
            state["count"].zero_()
            share = 1 - self.activation * self.period + self.activation
        return d.add_(momentum, alpha=share * self.momentum).mul_(self.lr)
