"""The aggregator contract: one coordinate-wise function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Aggregator(ABC):
    """Turns N contributions to the same elements into one.

    Class attributes:
        linear: True for the mean, which the wire can compute by itself while it sums. Others see every contribution,
            and so need a compressor that hands all of them over (`Compressor.aggregates`).
    """

    linear: ClassVar[bool] = False

    @abstractmethod
    def combine(self, rows: Tensor) -> Tensor:
        """Combine ``rows``, ``[N, n]``, rank r's gradient times its share (1/N), into ``[n]``."""
