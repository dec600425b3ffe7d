"""Signs with error feedback: the papers' equations, their counter-example, and what must not collect an error."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import Compressor, ErrorFeedback, Sign, SignVote
from lightning_sync.compressors.resolve import with_feedback
from lightning_sync.testing import make_specs, undelivered
from tests.compressors.reference import runs_like_the_reference


def reference(row: np.ndarray) -> np.ndarray:
    """Karimireddy et al. 2019, algorithm 1 (EF-signSGD), line 6: the mean magnitude times the signs; sign(0) = 1."""
    return np.float64(np.float32(np.abs(row).sum())) / row.size * np.where(row < 0, -1.0, 1.0)


@pytest.mark.parametrize("feedback", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    ranks=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    block=st.sampled_from([8, 32, 256]),
    seed=st.integers(0, 10**6),
)
def test_it_is_the_papers_algorithm(feedback: bool, ranks: int, sizes: list[int], block: int, seed: int) -> None:
    compressor: Compressor = ErrorFeedback(Sign(block)) if feedback else Sign(block)
    runs_like_the_reference(
        compressor, reference, block=block, feedback=feedback, ranks=ranks, sizes=sizes, seed=seed, tolerance=1e-6
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([8, 24, 256]), st.floats(-20, 15), st.sampled_from([1.0, 3.0]))
def test_the_contraction_is_the_documented_one(seed: int, block: int, exponent: float, power: float) -> None:
    """An equality: 1 - |x|_1^2 / (B |x|_2^2)."""
    x = torch.randn(6, block, generator=torch.Generator().manual_seed(seed)).pow(power) * 10**exponent
    codec = Sign(block)
    error = (codec.decode(codec.encode(x), torch.float32).double() - x.double()).square().sum(-1)
    size = x.double().square().sum(-1)
    delta = x.double().abs().sum(-1).square() / (block * size)
    assert torch.allclose(error / size, 1 - delta, atol=1e-5)
    assert bool((delta >= 1 / block - 1e-6).all())


def test_a_gaussian_gradient_keeps_two_over_pi() -> None:
    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
    codec = Sign()
    kept = 1 - (codec.decode(codec.encode(x), torch.float32) - x).square().sum() / x.square().sum()
    assert float(kept) == pytest.approx(2 / np.pi, abs=0.01)


def test_eight_signs_travel_in_a_byte() -> None:
    words, norm = Sign(256).encode(torch.randn(5, 256, dtype=torch.float64))
    assert (words.dtype, tuple(words.shape)) == (torch.uint8, (5, 32))
    assert words.nbytes + norm.nbytes == 5 * Sign(256).row_bytes() == 5 * 36


# ---- what must not collect an error


def test_a_parameter_that_is_zero_for_ever_collects_nothing() -> None:
    specs = make_specs({"used": (33, 40), "idle": (31, 37)})
    world = SimulatedWorld(ErrorFeedback(Sign()), specs, 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradients = [[torch.randn(33, 40, generator=generator), torch.zeros(31, 37)] for _ in range(3)]
        assert bool((world.reduce(gradients)[0][1] == 0).all())
    for state in world.states:
        for arena in state.arenas.values():
            assert float(arena["used"].abs().sum()) > 0
            assert float(arena["idle"].abs().sum()) == 0


def test_padding_collects_nothing_and_counts_for_nothing() -> None:
    """The last block of a parameter sends the same signs and the same sum as if nothing followed."""
    specs = make_specs({"w": (5, 60)})  # 300 elements: 44 in the second block, then 212 of padding
    world = SimulatedWorld(ErrorFeedback(Sign()), specs, 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        world.reduce([[torch.randn(5, 60, generator=generator)] for _ in range(2)])
    tails = [s.arenas[k]["w"] for s in world.states for k in ("residual", "owner_residual")]
    covered = [c["w"].elements()[1] for s in world.states for c in s.covers().values()]
    for tail, real in zip(tails, covered, strict=True):
        assert float(tail[~real].abs().sum()) == 0
        assert float(tail[real].abs().sum()) > 0


def test_a_zero_among_others_goes_out_as_plus_and_minus_in_turn() -> None:
    """It cannot be sent, but what is sent cancels: the sum stays bounded by the block's mean."""
    specs = make_specs({"w": (1, 256)})
    world = SimulatedWorld(ErrorFeedback(Sign()), specs, 1)
    gradient = torch.ones(1, 256)
    gradient[0, 7] = 0
    total, largest = 0.0, 0.0
    for _ in range(300):
        total += float(world.reduce([[gradient]])[0][0][0, 7])
        largest = max(largest, abs(total))
    assert largest < 4


# ---- Karimireddy et al. 2019, section 3


def least_squares(compressor: Compressor, steps: int, rate: float) -> float:
    """Counter-example 3: f(x) = (a_1 x)^2 + (a_2 x)^2 with a = ±(1, -1) + eps (1, 1), one term at a time.

    Every gradient is a multiple of one a, whose signs are ±(1, -1): plain signs never change x_1 + x_2. The learning
    rate falls as 1/sqrt(t), as the theorem wants. Blocks of two do not exist: each coordinate stands four times.
    """
    eps = 0.5
    rows = torch.tensor([[1 + eps, -1 + eps], [-1 + eps, 1 + eps]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(2, dtype=torch.float64)
    world = SimulatedWorld(compressor, make_specs({"x": (1, 8)}, torch.float64), 1)
    for t in range(steps):
        a = rows[int(torch.randint(2, (), generator=generator))]
        gradient = (2 * (a @ x) * a).repeat_interleave(4).view(1, 8)
        (delta,) = world.reduce([[gradient]])[0]
        x = x - rate / (1 + t) ** 0.5 * delta.view(2, 4).mean(1)
    return float((rows @ x).square().sum())


def test_signs_alone_stall_on_the_papers_counter_example_and_feedback_mends_it() -> None:
    start = 2 * (2 * 0.5) ** 2
    assert least_squares(Sign(8), 500, 0.3) >= start - 1e-9, "x_1 + x_2 cannot change"
    assert least_squares(ErrorFeedback(Sign(8)), 500, 0.3) < 1e-3 * start


# ---- majority vote


def vote(rows: list[np.ndarray]) -> np.ndarray:
    """Bernstein et al. 2019, algorithm 1, times the mean of the ranks' mean magnitudes; ties to the larger side."""
    sizes = [np.abs(r).mean() for r in rows]
    signs = [np.where(r < 0, -1.0, 1.0) * (s > 0) for r, s in zip(rows, sizes, strict=True)]
    count, weight = np.sum(signs, 0), np.sum([s * z for s, z in zip(sizes, signs, strict=True)], 0)
    return np.sign(np.where(count == 0, weight, count)) * np.mean(sizes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_vote_is_the_papers(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    world = SimulatedWorld(SignVote(64), make_specs({"w": (10, 64), "ragged": (7, 11)}, torch.float64), ranks)
    for step in range(3):
        gradients = [
            [torch.randn(10, 64, generator=generator).double(), torch.randn(7, 11, generator=generator).double()]
            for _ in range(ranks)
        ]
        if step == 1:
            gradients[0][0][3] = 0  # this rank abstains here
        whole, ragged = world.reduce(gradients)[0]
        for row in range(10):
            expected = vote([mine[0][row].numpy() for mine in gradients])
            np.testing.assert_allclose(whole[row].numpy(), expected, rtol=1e-6)
        first = vote([mine[1].flatten()[:64].numpy() for mine in gradients])
        np.testing.assert_allclose(ragged.flatten()[:64].numpy(), first, rtol=1e-6)


def test_a_minority_cannot_turn_a_sign() -> None:
    honest = torch.full((4, 256), 0.1)
    world = SimulatedWorld(SignVote(), make_specs({"w": (4, 256)}), 5)
    gradients = [[honest]] * 3 + [[-1000 * honest]] * 2
    assert bool((world.reduce(gradients)[0][0] > 0).all())


def test_one_bit_travels_down_as_well() -> None:
    world = SimulatedWorld(SignVote(), make_specs({"w": (4, 256)}), 4, record=True)
    world.reduce([[torch.randn(4, 256)] for _ in range(4)])
    assert {t.dtype for sent in world.sent for p in sent for t in p.tensors} == {torch.uint8, torch.float32}


def test_feedback_is_not_wrapped_around_a_vote() -> None:
    assert SignVote().biased
    assert with_feedback(SignVote()) == SignVote()
    with pytest.raises(TypeError, match=r"inner=SignVote.*cannot keep what it does not send"):
        ErrorFeedback(SignVote())


@pytest.mark.parametrize("kind", [Sign, SignVote])
@pytest.mark.parametrize("block", [0, 4, 12, 2**17, 8.0, True])
def test_a_wrong_block_is_refused(kind: Any, block: object) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(block=.*must be an integer from 8"):
        kind(block=block)


def test_undelivered_is_what_is_missing() -> None:
    world = SimulatedWorld(ErrorFeedback(Sign(block=64)), make_specs({"w": (9, 50)}, torch.float64), 3)
    generator = torch.Generator().manual_seed(0)
    missing = torch.zeros(450, dtype=torch.float64)
    for _ in range(30):
        gradients = [[torch.randn(9, 50, generator=generator, dtype=torch.float64)] for _ in range(3)]
        missing += sum(g[0] for g in gradients).view(-1) / 3 - world.reduce(gradients)[0][0].view(-1)
    assert torch.allclose(undelivered(world.states, "w"), missing, atol=1e-12)
