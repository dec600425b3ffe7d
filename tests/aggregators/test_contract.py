"""Every aggregator keeps the contract, and `check_aggregator` sees when one does not."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lightning_sync.aggregators import (
    Adasum,
    Aggregator,
    MajorityVote,
    Mean,
    Median,
    ParameterAggregator,
    Sum,
    TrimmedMean,
    WeightedMean,
    estimates,
    registry,
)
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors import Payload
from lightning_sync.testing import check_aggregator
from tests.aggregators import references

CASES: dict[str, tuple[Aggregator, Any, dict[str, bool]]] = {
    "mean": (Mean(), references.mean, {}),
    "weighted_mean": (WeightedMean(), references.mean, {}),
    "sum": (Sum(), references.total, {"keeps_equal": False}),
    "adasum": (Adasum(), references.adasum, {"symmetric": False}),
    "median": (Median(), references.median, {}),
    "trimmed_mean": (TrimmedMean(), references.trimmed_mean(0.2), {}),
    "trimmed_mean, 0.4": (TrimmedMean(0.4), references.trimmed_mean(0.4), {}),
    "majority_vote": (MajorityVote(), references.majority_vote, {"keeps_equal": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_aggregator_keeps_the_contract(case: str) -> None:
    aggregator, reference, options = CASES[case]
    check_aggregator(aggregator, reference=reference, **options)


def test_every_registered_aggregator_is_checked() -> None:
    checked = {registry.name(aggregator) for aggregator, _, _ in CASES.values()}
    assert checked == set(registry)


# ---- aggregators that break one promise each


@dataclass(frozen=True)
class CountsZeros(Aggregator):
    """The median of all rows, of those that take no part, too."""

    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        rows[shares == 0] = 0
        return (rows / shares.clamp(min=1e-3).to(rows.dtype)[:, None]).median(0).values


@dataclass(frozen=True)
class FirstRank(Aggregator):
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        first, *others = estimates(rows, shares)
        return sum((0 * row for row in others), first)


@dataclass(frozen=True)
class HidesNaN(Aggregator):
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        return torch.stack(estimates(rows, shares)).nan_to_num().mean(0)


@dataclass(frozen=True)
class Normed(Aggregator):
    """Not what it says: every element depends on the norm of all."""

    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        mean = torch.stack(estimates(rows, shares)).mean(0)
        return mean / (1 + mean.norm())


@dataclass(frozen=True)
class ShiftedMean(Aggregator):
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        return torch.stack(estimates(rows, shares)).mean(0) + 1


@dataclass(frozen=True)
class OwnersNorm(ParameterAggregator):
    """Forgets to ask the other owners for the norm of their blocks, and to say what asking costs."""

    asks: bool = False
    says: bool = False

    def reduce(self, rows: Tensor, shares: Tensor, counts: Sequence[int]) -> Generator[Payload, Payload, Tensor]:
        mean = torch.stack(estimates(rows, shares)).mean(0)
        squares = torch.stack([part.double().square().sum() for part in mean.split(list(counts))])
        if self.asks:
            yield Payload("sum", (squares,))
        per_block = squares.sqrt().repeat_interleave(torch.tensor(counts))
        return mean / (1 + per_block[:, None]).to(mean.dtype)

    def wire_bytes(self, parameters: int, topology: Topology) -> Bytes:
        return topology.all_reduce(8 * parameters) if self.says else Bytes()


class NotFrozen(Mean):
    __dataclass_params__: ClassVar[Any] = None


BROKEN: dict[str, tuple[Aggregator, dict[str, bool], str]] = {
    "counts ranks of share 0 as zeros": (CountsZeros(), {}, "without the ranks of share 0"),
    "prefers a rank": (FirstRank(), {}, "in another order of ranks"),
    "hides NaN": (HidesNaN(), {}, "NaN in the contribution of rank 0 came out finite"),
    "mixes elements": (Normed(), {"keeps_equal": False}, "elements influence each other"),
    "makes something of zeros": (ShiftedMean(), {}, "zeros became something else"),
    "does not keep equal contributions": (Sum(), {}, "equal contributions came back"),
    "forgets the other owners": (OwnersNorm(), {"keeps_equal": False}, "off what combine makes of it alone"),
    "sends more than it says": (OwnersNorm(asks=True), {"keeps_equal": False}, "is predicted, the wire counts"),
    "is no frozen dataclass": (NotFrozen(), {}, "must be a frozen dataclass"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_contract_check_sees_an_aggregator_that(case: str) -> None:
    aggregator, options, text = BROKEN[case]
    with pytest.raises(AssertionError, match=text):
        check_aggregator(aggregator, **options)


def test_an_aggregator_that_needs_norms_of_parameters_passes_once_it_asks_and_says_so() -> None:
    check_aggregator(OwnersNorm(asks=True, says=True), keeps_equal=False)


def test_a_result_that_is_not_the_references_is_seen() -> None:
    with pytest.raises(AssertionError, match="off the reference"):
        check_aggregator(Median(), reference=references.mean)
