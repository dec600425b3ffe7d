"""The mean and the sum: what an all-reduce computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_sync.aggregators.base import Aggregator, takes_part


@dataclass(frozen=True)
class Mean(Aggregator):
    r""":math:`\sum_r s_r g_r`, with shares :math:`s_r` that add up to 1; contributions arrive multiplied by them."""

    linear: ClassVar[bool] = True

    @override
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        return rows.sum(0)


@dataclass(frozen=True)
class Sum(Aggregator):
    r""":math:`\sum_r g_r`: N times the mean (with weights, the number of ranks that take part times their mean).

    On the wire, and in residuals, contributions are in units of the mean; the factor N comes at the end. A learning
    rate for the mean has to be divided by N.
    """

    linear: ClassVar[bool] = True

    @override
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        return rows.sum(0)

    @override
    def gain(self, shares: Tensor) -> float:
        return float(len(takes_part(shares)))
