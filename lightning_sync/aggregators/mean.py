"""The mean, weighted by the ranks' shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_sync.aggregators.base import Aggregator


@dataclass(frozen=True)
class Mean(Aggregator):
    """sum_r w_r g_r, with shares w_r that add up to 1; contributions arrive multiplied by their share already."""

    linear: ClassVar[bool] = True

    @override
    def combine(self, rows: Tensor) -> Tensor:
        return rows.sum(0)
