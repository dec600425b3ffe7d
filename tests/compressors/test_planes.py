"""Planes: words hold what was put in, and one tensor gives the bits of many."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sync.compressors import planes

WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def apart(blocks: Tensor) -> list[Tensor]:
    """The planes of ``[rows, P, w]`` as P tensors."""
    return [p.unsqueeze(1) for p in blocks.unbind(1)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(8, 1), (4, 2), (4, 4), (8, 2), (2, 8), (4, 8), (8, 4), (16, 2), (32, 1)]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_word_holds_one_digit_of_every_plane(
    shape: tuple[int, int], rows: int, width: int, seed: int, dtype: torch.dtype
) -> None:
    count, bits = shape
    offset = 1 << (bits - 1) if seed % 2 else 0
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(0, 2**bits, (rows, count, width), generator=generator) - offset
    digits[0, 0, 0], digits[-1, -1, -1] = -offset, 2**bits - 1 - offset
    whole = digits.to(dtype)
    words = planes.join([whole], bits, offset)
    assert (words.dtype, tuple(words.shape)) == (WORDS[count * bits], (rows, width))
    assert torch.equal(words, planes.join(apart(whole), bits, offset))
    (found,) = planes.split(words, bits, [whole], offset)
    assert found.dtype == dtype
    assert torch.equal(found, whole)
    separate = planes.split(words, bits, apart(whole), offset)
    assert torch.equal(torch.cat(separate, 1), found)


def test_every_bit_of_a_word_belongs_to_one_digit() -> None:
    for count, bits in ((8, 1), (8, 4), (4, 8), (16, 2)):
        ones = torch.zeros(count * bits, count, 1)
        for i in range(count):
            for b in range(bits):
                ones[i * bits + b, i] = 2**b
        words = planes.join([ones], bits).to(torch.int64) & (2 ** (count * bits) - 1)
        assert sorted(words.flatten().tolist()) == [2**k for k in range(count * bits)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 4, 8]), st.integers(1, 40), st.integers(0, 10**6), st.floats(-30, 20), st.booleans())
def test_a_total_does_not_depend_on_the_order(count: int, width: int, seed: int, exponent: float, wild: bool) -> None:
    """The place of a partial sum is not to matter; nor is whether planes come in one tensor or in many."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(3, count, width, generator=generator) * 10**exponent
    if wild:
        values *= torch.randn(values.shape, generator=generator).mul_(6).exp_()
    values[1] = 0
    expected = planes.total([values])
    assert torch.equal(planes.total(apart(values)), expected)
    shuffled = values[:, :, torch.randperm(width, generator=generator)]
    assert torch.equal(planes.total([shuffled]), expected)
    exact = values.double().sum((1, 2), keepdim=True)
    assert bool(((expected.double() - exact).abs() <= exact * (width**2 * 2.0**-23 + count * 2.0**-23)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_peak_and_total(bad: float) -> None:
    values = torch.ones(2, 4, 6)
    values[1, 2, 3] = bad
    for result in (planes.peak([values]), planes.peak(apart(values)), planes.total([values])):
        assert result.isfinite().flatten().tolist() == [True, False]


def test_positions_count_through_the_block() -> None:
    values = torch.zeros(2, 4, 3)
    (whole,) = planes.positions([values])
    assert whole.flatten().tolist() == list(range(12))
    assert torch.equal(torch.cat(planes.positions(apart(values))), whole)


def test_planes_are_combined_by_halves() -> None:
    """Not a promise of arithmetic but of order: floating-point sums depend on it."""

    def pair(a: Any, b: Any) -> Any:
        return a * 10 + b

    values = torch.arange(4.0).view(1, 4, 1)
    first, second = 0 * 10 + 2, 1 * 10 + 3
    for cut in ([values], apart(values)):
        assert planes.fold(cut, pair).item() == first * 10 + second
