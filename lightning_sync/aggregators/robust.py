"""Aggregators that a minority of ranks cannot move far: median, trimmed mean, majority vote."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_sync.aggregators.base import Aggregator, estimates
from lightning_sync.aggregators.selection import order_statistics


@dataclass(frozen=True)
class Median(Aggregator):
    """The median of every element over the ranks; the mean of the middle two where their number is even.

    (Yin et al. 2018, "Byzantine-robust distributed learning", definition 1.) Whatever fewer than half of the ranks
    send, the result lies between values that other ranks sent. The price: the median of skewed gradients is not the
    gradient of the mean loss, and it is noisier (of normal noise it keeps pi/2 times the variance that the mean keeps).

    Ranks count alike, whatever their shares: a rank must not gain influence by the weight that it claims. With two
    ranks it is the mean.
    """

    @override
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        present = estimates(rows, shares)
        middle = order_statistics(present, (len(present) - 1) // 2, len(present) // 2 + 1)
        return middle[0] if len(middle) == 1 else middle[0].add_(middle[1]).mul_(0.5)


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """The mean of every element over the ranks, without the smallest and the largest values.

    (Yin et al. 2018, "Byzantine-robust distributed learning", definition 2.) Of M ranks that take part, k =
    ceil(fraction M) values are left out at each end, though never all: at most (M - 1) // 2, which leaves the median.
    So up to k ranks may send anything. With two ranks it is the mean. Ranks count alike, as in `Median`.

    Args:
        fraction: Above 0 and below 0.5. Larger: more bad ranks do no harm, and more of the good ones are thrown away.

    Raises:
        ValueError: for another fraction.
    """

    fraction: float = 0.2

    def __post_init__(self) -> None:
        number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if not number or not 0 < self.fraction < 0.5:
            raise ValueError(
                f"TrimmedMean(fraction={self.fraction!r}): expected a number above 0 and below 0.5, the share of ranks "
                "left out at each end. Use Mean() to leave out none, Median() to keep only the middle."
            )

    def trimmed(self, present: int) -> int:
        """How many of `present` values are left out at each end."""
        return min(math.ceil(self.fraction * present - 1e-9), (present - 1) // 2)  # 0.07 * 100 is above 7

    @override
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        present = estimates(rows, shares)
        out = self.trimmed(len(present))
        total, *others = order_statistics(present, out, len(present) - out)
        for row in others:
            total.add_(row)
        return total.div_(1 + len(others))


@dataclass(frozen=True)
class MajorityVote(Aggregator):
    r"""The sign that most ranks gave every element: :math:`\mathrm{sign} \sum_r \mathrm{sign}\, g_r`.

    (Bernstein et al. 2019, "signSGD with majority vote", algorithm 1.) A rank with exactly 0 abstains; a tie is 0. All
    ranks count alike, and nobody counts for more by sending more.

    The result has no scale: every element is -1, 0 or 1. A step of SGD then moves every weight by the learning rate
    itself, so it wants one like Adam's (1e-4 to 1e-3), not one like SGD's; momentum and weight decay go into the
    optimiser as ever (the paper's Signum takes signs of each rank's momentum instead). Adaptive optimisers, which
    divide by the gradient's size, keep their rates. Clipping by norm would see the norm of the signs, the root of their
    number.
    """

    @override
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        votes, *others = (_sign_(row) for row in estimates(rows, shares))
        for row in others:
            votes.add_(row)
        return _sign_(votes)


def _sign_(row: Tensor) -> Tensor:
    """Signs in place; NaN stays NaN (torch's sign makes it 0)."""
    nan = row.isnan()
    return row.sign_().masked_fill_(nan, math.nan)
