"""BlockInt8 and BlockInt4 against a loop in numpy that follows their definition."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import BF16, BlockInt4, BlockInt8, ErrorFeedback
from lightning_sync.compressors.random import row_keys, row_streams, uniform
from lightning_sync.testing import make_specs, undelivered
from tests.compressors.reference import Quantise, runs_like_the_reference

CODECS: dict[type[Any], int] = {BlockInt8: 127, BlockInt4: 7}


def reference(top: int) -> Quantise:
    def quantise(row: np.ndarray) -> np.ndarray:
        """One block, element by element: scale max|x| / top, nearest integer, back."""
        scale = np.float64(np.float32(np.abs(row).max())) / top
        if scale == 0:
            return np.zeros_like(row)
        return np.array([np.clip(np.rint(x / scale), -top, top) * scale for x in row])

    return quantise


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("feedback", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    ranks=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=3),
    block=st.sampled_from([8, 24, 64, 256]),
    seed=st.integers(0, 10**6),
)
def test_it_is_the_reference_loop(
    kind: type[Any], feedback: bool, ranks: int, sizes: list[int], block: int, seed: int
) -> None:
    codec = kind(block)
    compressor = ErrorFeedback(codec) if feedback else codec
    runs_like_the_reference(
        compressor, reference(CODECS[kind]), block=block, feedback=feedback, ranks=ranks, sizes=sizes, seed=seed
    )


@pytest.mark.parametrize("kind", CODECS)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(-30, 30), st.sampled_from([torch.float32, torch.float64]))
def test_the_error_is_at_most_half_a_step_and_never_more_than_the_element(
    kind: type[Any], seed: int, exponent: float, dtype: torch.dtype
) -> None:
    codec, top = kind(64), CODECS[kind]
    blocks = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed)).to(dtype) * 10**exponent
    error = (codec.decode(codec.encode(blocks), dtype) - blocks).abs().double()
    size = blocks.abs().double()
    assert bool((error <= size.amax(-1, keepdim=True) / (2 * top) * (1 + 1e-5)).all())
    assert bool((error <= size * (1 + 1e-5)).all())
    contraction = error.square().sum(-1) / size.square().sum(-1)
    assert bool((contraction <= 1 - 1 / 64).all())


@pytest.mark.parametrize("kind", CODECS)
def test_the_worst_block_is_contracted_as_documented(kind: type[Any]) -> None:
    """One element is everything but just below half a step: only the largest arrives."""
    top = CODECS[kind]
    blocks = torch.full((1, 64), 0.499 / top)
    blocks[0, 5] = 1
    codec = kind(64)
    error = codec.decode(codec.encode(blocks), torch.float32) - blocks
    assert float(error.square().sum() / blocks.square().sum()) <= 1 - 1 / 64
    assert float(error[0, 5]) == 0


def test_numbers_below_the_smallest_scale_keep_the_bound() -> None:
    codec = BlockInt8(8)
    blocks = torch.full((1, 8), 1e-37)
    error = (codec.decode(codec.encode(blocks), torch.float32) - blocks).abs()
    assert bool((error <= torch.finfo(torch.float32).tiny / 2).all())


@pytest.mark.parametrize("kind", CODECS)
def test_zeros_are_sent_as_zeros_and_overflow_is_seen(kind: type[Any]) -> None:
    codec = kind(8)
    blocks = torch.zeros(4, 8)
    blocks[1, 3] = float("inf")
    blocks[2, 3] = float("nan")
    blocks[3, 3] = -float("inf")
    out = codec.decode(codec.encode(blocks), torch.float32)
    assert bool((out[0] == 0).all())
    assert not bool(out[1:].isfinite().any())


@pytest.mark.parametrize(("kind", "words"), [(BlockInt8, 64), (BlockInt4, 32)])
def test_the_wire_carries_packed_integers_and_one_float32_per_block(kind: type[Any], words: int) -> None:
    codes, largest = kind(256).encode(torch.randn(5, 256, dtype=torch.float64))
    assert (codes.dtype, tuple(codes.shape)) == (torch.int32, (5, words))
    assert (largest.dtype, tuple(largest.shape)) == (torch.float32, (5, 1))
    assert codes.nbytes + largest.nbytes == 5 * kind(256).row_bytes()


@pytest.mark.parametrize("kind", CODECS)
def test_rounding_at_random_is_right_on_average(kind: type[Any]) -> None:
    """One number per tensor: the error along the gradient, over many steps, within five of its standard deviations."""
    top, steps, ranks = CODECS[kind], 400, 3
    specs = make_specs({"w": (40, 64), "v": (3, 50)})
    world = SimulatedWorld(kind(64, stochastic=True), specs, ranks)
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(p.shape, generator=generator) for p in specs] for _ in range(ranks)]
    means = [sum(mine[i].double() for mine in gradients) / ranks for i in range(2)]
    along = [[] for _ in means]  # type: list[list[float]]
    for _ in range(steps):
        for i, result in enumerate(world.reduce(gradients)[0]):
            along[i].append(float(((result.double() - means[i]) * means[i]).sum() / means[i].square().sum()))
            step = max(float(mine[i].abs().max()) for mine in gradients) / top
            assert float((result - means[i]).abs().max()) <= 2 * step + 2 * step / top
    for samples in map(np.array, along):
        assert samples.std() > 0
        assert abs(samples.mean()) < 5 * samples.std() / np.sqrt(steps)


@pytest.mark.parametrize("kind", CODECS)
def test_rounding_at_random_takes_one_of_the_two_nearest(kind: type[Any]) -> None:
    top = CODECS[kind]
    codec = kind(64, stochastic=True)
    blocks = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    keys = row_keys(row_streams(0, [("w",)], [range(9)]), 4)
    noise = uniform(keys.unsqueeze(1), torch.arange(64, dtype=torch.int32).view(1, -1)).squeeze(1).double()
    scale = blocks.double().abs().amax(-1, keepdim=True) / top
    expected = torch.floor(blocks.double() / scale + noise).clamp(-top, top) * scale
    found = codec.decode(codec.encode(blocks, keys), torch.float32).double()
    off = (found - expected).abs() > 1e-5
    assert float(off.double().mean()) < 0.001, "but where float32 and float64 fall on two sides of an integer"
    assert bool(((found - blocks.double()).abs() <= scale * (1 + 1e-5)).all())


def test_noise_differs_between_ranks_steps_and_parameters_but_not_buckets() -> None:
    codec = BlockInt4(8, stochastic=True)
    gradient = [torch.linspace(-1, 1, 64)] * 2
    specs = make_specs({"a": (64,), "b": (64,)})
    world = SimulatedWorld(codec, specs, 2, record=True)
    apart = SimulatedWorld(codec, specs, 2, record=True)
    world.reduce([gradient] * 2)
    sent = [p.tensors[0] for p in world.sent[0]]
    assert not torch.equal(sent[0], sent[1]), "ranks"
    apart.reduce([gradient[:1]] * 2, ["a"])
    (alone,) = {p.tensors[0].numel() for p in apart.sent[0]}
    assert alone * 2 == sent[0].numel()
    before = world.reduce([gradient] * 2)[0]
    assert not torch.equal(before[0], before[1]), "parameters"
    assert not torch.equal(before[0], world.reduce([gradient] * 2)[0][0]), "steps"


@pytest.mark.parametrize("kind", CODECS)
def test_a_codec_that_rounds_at_random_asks_for_keys(kind: type[Any]) -> None:
    with pytest.raises(ValueError, match=r"stochastic=True\) rounds at random: pass keys"):
        kind(stochastic=True).encode(torch.ones(1, 256))


@pytest.mark.parametrize(("kind", "steps", "within"), [(BlockInt8, 400, 0.02), (BlockInt4, 2000, 0.08)])
def test_error_feedback_delivers_what_quantisation_alone_loses(kind: type[Any], steps: int, within: float) -> None:
    """A gradient far below half a step of its block never arrives without feedback, and does with it."""
    gradient = torch.full((2, 256), 1e-3)
    gradient[:, 0] = 1.0
    for compressor, arrived in ((kind(), 0.0), (ErrorFeedback(kind()), 1.0)):
        world = SimulatedWorld(compressor, make_specs({"w": (2, 256)}), 2)
        total = sum(world.reduce([[gradient], [gradient]])[0][0] for _ in range(steps))
        assert float(total[:, 1:].mean()) / (1e-3 * steps) == pytest.approx(arrived, abs=within)


def test_decay_fades_what_was_not_sent() -> None:
    compressor = ErrorFeedback(BlockInt8(), decay=0.5)
    world = SimulatedWorld(compressor, make_specs({"w": (4, 256)}), 2)
    world.reduce([[torch.randn(4, 256)] for _ in range(2)])
    before = undelivered(world.states, "w").abs().max()
    for _ in range(3):
        world.reduce([[torch.zeros(4, 256)] for _ in range(2)])
    assert undelivered(world.states, "w").abs().max() < before


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("block", [0, 7, 9, 65537, 65544, 8.0, True, "256"])
def test_a_wrong_block_is_refused(kind: type[Any], block: object) -> None:
    with pytest.raises(ValueError, match="block must be an integer from 8 to 65536, and a multiple of 8"):
        kind(block=block)


@pytest.mark.parametrize("kind", CODECS)
def test_a_wrong_way_of_rounding_is_refused(kind: type[Any]) -> None:
    with pytest.raises(ValueError, match=r"\(stochastic='yes'\): expected True or False"):
        kind(stochastic="yes")


@pytest.mark.parametrize("decay", [0, -1, 1.01, float("nan")])
def test_a_wrong_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must lie in \(0, 1\]"):
        ErrorFeedback(BlockInt8(), decay=decay)


def test_feedback_wraps_what_can_keep_what_it_does_not_send() -> None:
    with pytest.raises(TypeError, match="cannot keep what it does not send"):
        ErrorFeedback(BF16())


def test_a_payload_of_another_kind_or_size_is_refused() -> None:
    codec = BlockInt4(64)
    words, largest = codec.encode(torch.randn(3, 64))
    wrong = {
        "kind": (words.to(torch.int64), largest),
        "width": (words[:, :4], largest),
        "numbers": (words, largest.double()),
        "rows": (words, largest[:2]),
        "count": (words,),
        "another codec's": BlockInt8(64).encode(torch.randn(3, 64)),
    }
    for code in wrong.values():
        with pytest.raises(ValueError, match=r"BlockInt4\(block=64.*expected a payload of torch.int32 \[..., 8\]"):
            codec.decode(code, torch.float32)
