"""BlockInt8 against a loop in numpy that follows its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import BlockInt8, ErrorFeedback
from lightning_sync.testing import make_specs, undelivered


def reference_quantise(row: np.ndarray) -> np.ndarray:
    """One block, element by element: scale max|x|/127, nearest integer, back."""
    scale = np.float64(np.float32(np.abs(row).max() / 127))
    if scale == 0:
        return np.zeros_like(row)
    return np.array([np.clip(np.rint(x / scale), -127, 127) * scale for x in row])


def reference_mean(gradients: list[np.ndarray], block: int) -> np.ndarray:
    """Both ends: what ranks send is quantised, and so is what the owner makes of it."""
    flat = [
        np.concatenate([g.ravel(), np.zeros(-g.size % block)]).reshape(-1, block) / len(gradients) for g in gradients
    ]
    total = sum(np.stack([reference_quantise(row) for row in f]) for f in flat)
    out = np.stack([reference_quantise(row) for row in total])
    return out.ravel()[: gradients[0].size].reshape(gradients[0].shape)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.sampled_from([8, 64, 256]), st.integers(0, 10**6))
def test_it_is_the_reference_loop(world_size: int, size: int, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(world_size)]
    world = SimulatedWorld(BlockInt8(block), make_specs({"w": (size,)}, torch.float64), world_size)
    (result,) = world.reduce([[g] for g in gradients])[0]
    expected = reference_mean([g.numpy() for g in gradients], block)
    # The division by N may round differently, and so may a code that lies exactly between two: one step of the scale.
    close = np.isclose(result.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert close.mean() > 0.99
    assert np.abs(result.numpy() - expected).max() <= np.abs(expected).max() / 60


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(-30, 30), st.sampled_from([torch.float32, torch.float64]))
def test_the_error_of_an_element_is_at_most_half_a_step_of_its_block(
    seed: int, exponent: float, dtype: torch.dtype
) -> None:
    codec = BlockInt8(64)
    blocks = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed)).to(dtype) * 10**exponent
    error = (codec.decode(codec.encode(blocks), dtype) - blocks).abs().double()
    bound = blocks.abs().amax(-1, keepdim=True).double() / 254
    assert bool((error <= bound * (1 + 1e-5)).all())


def test_numbers_below_the_smallest_scale_keep_the_bound() -> None:
    codec = BlockInt8(8)
    blocks = torch.full((1, 8), 1e-37)
    error = (codec.decode(codec.encode(blocks), torch.float32) - blocks).abs()
    assert bool((error <= torch.finfo(torch.float32).tiny / 2).all())


def test_zeros_are_sent_as_zeros_and_overflow_is_seen() -> None:
    codec = BlockInt8(8)
    blocks = torch.zeros(3, 8)
    blocks[1, 3] = float("inf")
    blocks[2, 3] = float("nan")
    out = codec.decode(codec.encode(blocks), torch.float32)
    assert bool((out[0] == 0).all())
    assert bool(out[1:].isnan().all())


def test_the_wire_carries_int8_and_one_float32_per_block() -> None:
    codes, scales = BlockInt8(256).encode(torch.randn(5, 256, dtype=torch.float64))
    assert (codes.dtype, tuple(codes.shape)) == (torch.int8, (5, 256))
    assert (scales.dtype, tuple(scales.shape)) == (torch.float32, (5, 1))
    assert codes.nbytes + scales.nbytes == 5 * BlockInt8(256).row_bytes()


def test_error_feedback_delivers_what_quantisation_alone_loses() -> None:
    """A gradient far below half a step of its block never arrives without feedback, and does with it."""
    gradient = torch.full((4, 256), 1e-3)
    gradient[:, 0] = 1.0
    for compressor, arrived in ((BlockInt8(), 0.0), (ErrorFeedback(BlockInt8()), 1.0)):
        world = SimulatedWorld(compressor, make_specs({"w": (4, 256)}), 2)
        total = sum(world.reduce([[gradient], [gradient]])[0][0] for _ in range(400))
        assert float(total[:, 1:].mean()) / 0.4 == pytest.approx(arrived, abs=0.02)


def test_decay_fades_what_was_not_sent() -> None:
    compressor = ErrorFeedback(BlockInt8(), decay=0.5)
    world = SimulatedWorld(compressor, make_specs({"w": (4, 256)}), 2)
    world.reduce([[torch.randn(4, 256)] for _ in range(2)])
    before = undelivered(world.states, "w").abs().max()
    for _ in range(3):
        world.reduce([[torch.zeros(4, 256)] for _ in range(2)])
    assert undelivered(world.states, "w").abs().max() < before


@pytest.mark.parametrize("block", [0, 7, 65537, 8.0, True, "256"])
def test_a_wrong_block_is_refused(block: object) -> None:
    with pytest.raises(ValueError, match="block must be an integer from 8 to 65536"):
        BlockInt8(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("decay", [0, -1, 1.01, float("nan")])
def test_a_wrong_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must lie in \(0, 1\]"):
        ErrorFeedback(BlockInt8(), decay=decay)


def test_feedback_wraps_what_can_keep_what_it_does_not_send() -> None:
    from lightning_sync.compressors import BF16

    with pytest.raises(TypeError, match="cannot keep what it does not send"):
        ErrorFeedback(BF16())
