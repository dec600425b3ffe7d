"""Inf and NaN are found wherever they are, and nothing else is."""

import logging

import pytest
import torch

from lightning_sync.comm.counters import Counters
from lightning_sync.nonfinite import (
    SKIPS_IN_A_ROW,
    NonFiniteError,
    Skips,
    culprit,
    culprit_code,
    first_nonfinite,
)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_the_first_tensor_that_is_not_finite_is_named(dtype: torch.dtype, bad: float) -> None:
    names = ["a", "b", "c", "d"]
    tensors = [torch.ones(s, dtype=dtype) for s in ((3, 4), (1000,), (0,), (7,))]
    assert first_nonfinite(names, tensors) is None
    tensors[3][6] = bad
    assert first_nonfinite(names, tensors) == "d"
    tensors[1][999] = bad
    assert first_nonfinite(names, tensors) == "b"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_numbers_are_finite(dtype: torch.dtype) -> None:
    tensors = [torch.full((1000,), torch.finfo(dtype).max, dtype=dtype), torch.ones(3, dtype=torch.int64)]
    assert first_nonfinite(["a", "b"], tensors) is None
    assert first_nonfinite([], []) is None


def test_a_sparse_gradient_is_looked_into() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, float("nan")], (5,), check_invariants=True)
    assert first_nonfinite(["a", "b"], [torch.ones(2), sparse]) == "b"


def test_the_agreed_code_names_the_lowest_rank_that_has_it_and_its_first_parameter() -> None:
    good, bad = torch.ones(4), torch.tensor([1.0, float("nan")])
    ranks = [[good, good, good], [good, bad, bad], [bad, good, good]]
    codes = [int(culprit_code(tensors, rank, 3)) for rank, tensors in enumerate(ranks)]
    assert culprit(max(codes), ["a", "b", "c"], 3) == ("b", 1)
    assert culprit(codes[2], ["a", "b", "c"], 3) == ("a", 2)
    assert codes[0] == 0
    assert culprit(0, ["a", "b", "c"], 3) is None


def test_a_run_that_only_skips_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    skips = Skips(counters, speaks=True)
    with caplog.at_level(logging.WARNING, logger="lightning_sync"):
        for step in range(SKIPS_IN_A_ROW - 1):
            skips.skipped(step, "w", 1)
        skips.taken()
        for step in range(SKIPS_IN_A_ROW - 1):
            skips.skipped(step, "w", 1)
        assert len(caplog.records) == counters.skipped_steps == 2 * (SKIPS_IN_A_ROW - 1)
        assert "the gradient of 'w' holds inf or NaN on rank 1" in caplog.text
        with pytest.raises(NonFiniteError, match="'w'") as caught:
            skips.skipped(500, "w", 1)
    assert "100 steps in a row" in str(caught.value.__cause__)
