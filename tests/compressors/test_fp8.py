"""FP8 against torch's own 8-bit floats."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.compressors import FP8, ErrorFeedback
from lightning_sync.compressors.fp8 import from_e4m3, to_e4m3
from tests.compressors.reference import runs_like_the_reference


def grid() -> np.ndarray:
    """All finite e4m3 numbers, from the format's definition (Micikevicius et al. 2022, table 1)."""
    found = [m / 8 * 2.0**-6 for m in range(8)]
    found += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return np.array(sorted({-x for x in found} | set(found)))


def reference(row: np.ndarray) -> np.ndarray:
    """The nearest number of the grid; there are no ties in random numbers."""
    scale = np.float64(np.float32(np.float32(np.abs(row).max()) / np.float32(448)))
    if scale == 0:
        return np.zeros_like(row)
    numbers = grid()
    return numbers[np.abs(np.float32(row / scale).astype(np.float64)[:, None] - numbers).argmin(1)] * scale


@pytest.mark.parametrize("feedback", [False, True])
@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(1, 4), size=st.integers(1, 500), block=st.sampled_from([8, 64, 256]), seed=st.integers(0, 10**6)
)
def test_it_is_the_nearest_number_of_the_format(feedback: bool, ranks: int, size: int, block: int, seed: int) -> None:
    compressor = ErrorFeedback(FP8(block)) if feedback else FP8(block)
    runs_like_the_reference(
        compressor, reference, block=block, feedback=feedback, ranks=ranks, sizes=[size], seed=seed, tolerance=1e-6
    )


def test_its_bits_are_torchs() -> None:
    """Ties, subnormal numbers and both ends included."""
    every = torch.arange(256, dtype=torch.int32)
    numbers = every.to(torch.uint8).view(torch.float8_e4m3fn).float()
    finite = numbers.isfinite()
    assert torch.equal(from_e4m3(every)[finite], numbers[finite])
    steps = numbers[finite].sort().values
    middles = (steps[1:] + steps[:-1]) / 2
    random = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 50
    values = torch.cat(
        [steps, middles, middles.nextafter(torch.tensor(500.0)), middles.nextafter(torch.tensor(-500.0)), random]
    )
    values = values.clamp(-448, 448)
    expected = values.to(torch.float8_e4m3fn)
    assert torch.equal(from_e4m3(to_e4m3(values)), expected.float())
    assert torch.equal(to_e4m3(values)[values > 0], expected.view(torch.uint8).to(torch.int32)[values > 0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-25, 25), st.sampled_from([8, 256]))
def test_errors_are_as_documented(seed: int, exponent: float, block: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(5, block, generator=generator).mul(3).exp()
        * torch.randn(5, block, generator=generator)
        * 10**exponent
    )
    codec = FP8(block)
    error = (codec.decode(codec.encode(x), torch.float32).double() - x.double()).abs()
    size, largest = x.double().abs(), x.double().abs().amax(-1, keepdim=True)
    assert bool((error <= torch.maximum(size / 16, largest * 2.0**-10 / 448) * (1 + 1e-5)).all())
    assert bool((error <= size * (1 + 1e-5)).all())
    assert bool((error.square().sum(-1) <= (2.0**-8 + 1e-11 * block) * size.square().sum(-1) * (1 + 1e-5)).all())


def test_it_travels_as_integers_of_a_byte_each() -> None:
    words, largest = FP8().encode(torch.randn(3, 256))
    assert (words.dtype, words.nbytes, largest.nbytes) == (torch.int32, 3 * 256, 3 * 4)
    assert FP8().row_bytes() == 260


def test_zeros_stay_zeros_and_overflow_is_seen() -> None:
    codec = FP8(8)
    blocks = torch.zeros(4, 8)
    blocks[1, 3], blocks[2, 3], blocks[3, 3] = float("inf"), float("nan"), -float("inf")
    out = codec.decode(codec.encode(blocks), torch.float32)
    assert bool((out[0] == 0).all())
    assert not bool(out[1:].isfinite().any())


@pytest.mark.parametrize("block", [0, 12, 2**17, "8"])
def test_a_wrong_block_is_refused(block: object) -> None:
    with pytest.raises(ValueError, match=r"FP8\(block=.*must be an integer from 8"):
        FP8(block=block)  # type: ignore[arg-type]
