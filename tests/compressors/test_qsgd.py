"""QSGD against the paper's equations: levels, mean and variance."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import QSGD, BlockInt4
from lightning_sync.compressors.random import row_keys, row_streams, uniform
from lightning_sync.compressors.resolve import with_feedback
from lightning_sync.testing import make_specs


def noise(rows: int, block: int, step: int) -> tuple[torch.Tensor, np.ndarray]:
    keys = row_keys(row_streams(0, [("w",)], [range(rows)]), step)
    drawn = uniform(keys.unsqueeze(1), torch.arange(block, dtype=torch.int32).view(1, -1)).squeeze(1)
    return keys, drawn.double().numpy()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([16, 48, 512]), st.integers(0, 10**6), st.floats(-15, 15))
def test_it_is_the_papers_equation(bits: int, block: int, seed: int, exponent: float) -> None:
    """Alistarh et al. 2017, section 3.1, for the same random numbers: l or l + 1 levels of |v| / s."""
    v = torch.randn(4, block, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**exponent
    keys, u = noise(4, block, seed)
    codec = QSGD(bits, block)
    found = codec.decode(codec.encode(v, keys), torch.float64).numpy()
    levels = 2 ** (bits - 1) - 1
    norm = np.sqrt((v.numpy() ** 2).sum(-1, keepdims=True))
    expected = norm / levels * np.floor(levels * v.numpy() / norm + u)
    off = ~np.isclose(found, expected, rtol=1e-6, atol=1e-9 * norm)
    assert off.mean() < 0.01, "but where the norm's last bit decides"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_it_is_right_on_average_and_its_variance_is_bounded(bits: int) -> None:
    """One number per tensor, within five of its standard deviations; and lemma 3.1's bound, on rank and owner."""
    steps, block = 300, 512
    specs = make_specs({"w": (20, block)}, torch.float64)
    world = SimulatedWorld(QSGD(bits, block), specs, 1)
    v = torch.randn(20, block, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = 2 ** (bits - 1) - 1
    bound = min(block / s**2, block**0.5 / s)
    along, squares = [], []
    for _ in range(steps):
        error = world.reduce([[v]])[0][0] - v
        along.append(float((error * v).sum() / v.square().sum()))
        squares.append(float(error.square().sum() / v.square().sum()))
    samples = np.array(along)
    assert abs(samples.mean()) < 5 * samples.std() / np.sqrt(steps)
    assert np.mean(squares) <= (1 + bound) ** 2 - 1


def test_it_needs_no_feedback_and_integers_by_the_largest_are_closer() -> None:
    """Why QSGD is there for comparison: BlockInt4 sends as many bits with a smaller error."""
    assert with_feedback(QSGD()) == QSGD()
    v = torch.randn(50, 512, generator=torch.Generator().manual_seed(0))
    keys, _ = noise(50, 512, 0)
    errors: list[float] = []
    for codec in (QSGD(4, 512), BlockInt4(512, stochastic=True)):
        assert codec.row_bytes() == 260
        errors.append(float((codec.decode(codec.encode(v, keys), torch.float32) - v).norm()))
    assert errors[1] < 0.5 * errors[0]


def test_one_element_that_is_everything_arrives() -> None:
    v = torch.zeros(1, 512)
    v[0, 100] = 3.0
    keys, _ = noise(1, 512, 0)
    for bits in (2, 4, 8):
        codec = QSGD(bits)
        assert torch.allclose(codec.decode(codec.encode(v, keys), torch.float32), v, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 3}, r"QSGD\(bits=3\): expected one of 8, 4, 2"),
        ({"bits": True}, r"QSGD\(bits=True\)"),
        ({"block": 8}, r"QSGD\(block=8\): block must be an integer from 16"),
        ({"block": 24}, r"multiple of 16"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        QSGD(**options)
