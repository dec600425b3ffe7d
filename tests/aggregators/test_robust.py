"""Median, trimmed mean and majority vote: what they compute, and how little a minority can do to it."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.aggregators import MajorityVote, Median, TrimmedMean
from lightning_sync.aggregators.selection import network, order_statistics


def equal(size: int) -> torch.Tensor:
    return torch.full((size,), 1 / size, dtype=torch.float64)


@pytest.mark.parametrize("size", range(1, 9))
def test_networks_select_from_every_order_of_zeros_and_ones(size: int) -> None:
    """Whatever selects right from all of these selects right from everything (the 0-1 principle)."""
    columns = torch.tensor(list(product([0.0, 1.0], repeat=size))).T.contiguous()
    in_order = columns.sort(0).values
    for first in range(size):
        for last in range(first + 1, size + 1):
            found = order_statistics(list(columns.clone()), first, last)
            assert torch.equal(torch.stack(found).sort(0).values, in_order[first:last]), (first, last)


@settings(max_examples=60, deadline=None)
@given(st.integers(9, 40), st.data())
def test_networks_select_from_many_rows(size: int, data: Any) -> None:
    first = data.draw(st.integers(0, size - 1))
    last = data.draw(st.integers(first + 1, size))
    rows = torch.randn(size, 50, generator=torch.Generator().manual_seed(size)).round(decimals=1)
    found = torch.stack(order_statistics(list(rows.clone()), first, last))
    assert torch.equal(found.sort(0).values, rows.sort(0).values[first:last])


@pytest.mark.parametrize(("size", "comparators"), [(2, 0), (3, 3), (4, 4), (5, 8), (8, 16)])
def test_a_median_takes_fewer_comparators_than_a_sort(size: int, comparators: int) -> None:
    found = network(size, (size - 1) // 2, size // 2 + 1)
    assert len(found) == comparators
    assert all(c.keep_low or c.keep_high for c in found)


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    rows = torch.tensor([[1.0, 9.0], [2.0, 8.0], [100.0, -5.0], [4.0, 7.0]]) / 4
    assert Median().combine(rows, equal(4)).tolist() == [3.0, 7.5]


def test_a_rank_does_not_gain_influence_by_the_weight_that_it_claims() -> None:
    shares = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)
    rows = torch.tensor([[1e6], [1.0], [2.0]], dtype=torch.float64) * shares[:, None]
    assert Median().combine(rows.clone(), shares).item() == pytest.approx(2.0)
    assert MajorityVote().combine(torch.tensor([[-1.0], [1.0], [1.0]], dtype=torch.float64), shares).item() == 1


@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(0.2), TrimmedMean(0.4)])
@pytest.mark.parametrize("lie", [1e30, -1e30, math.inf, -math.inf])
def test_one_of_five_ranks_cannot_leave_the_range_of_the_others(aggregator: Any, lie: float) -> None:
    good = torch.randn(4, 100)
    rows = torch.cat([good, torch.full((1, 100), lie)]) / 5
    result = aggregator.combine(rows, equal(5))
    assert bool((result >= good.min(0).values - 1e-6).all())
    assert bool((result <= good.max(0).values + 1e-6).all())


@pytest.mark.parametrize(
    ("fraction", "present", "expected"),
    [(0.2, 5, 1), (0.2, 4, 1), (0.2, 6, 2), (0.2, 3, 1), (0.2, 2, 0), (0.2, 1, 0), (0.07, 100, 7), (0.49, 9, 4)],
)
def test_at_least_the_fraction_is_left_out_at_each_end_but_never_all(
    fraction: float, present: int, expected: int
) -> None:
    assert TrimmedMean(fraction).trimmed(present) == expected


@pytest.mark.parametrize("fraction", [0.5, 0.7, 0, -0.1, math.nan, "half", True, None])
def test_a_fraction_that_would_leave_nothing_or_everything_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match=r"TrimmedMean\(fraction=.*expected a number above 0 and below 0\.5"):
        TrimmedMean(fraction)


def test_a_vote_counts_signs_abstentions_and_ties() -> None:
    rows = torch.tensor([[5.0, -1.0, 0.0, 3.0], [-0.1, -9.0, 0.0, -3.0], [-0.1, 4.0, 2.0, 0.0], [-7.0, -1.0, 0.0, 0.0]])
    assert MajorityVote().combine(rows, equal(4)).tolist() == [-1.0, -1.0, 1.0, 0.0]
