"""Random blocks: every rank draws the same, every block is drawn as often, and what is not sent is late or unbiased."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import BF16, BlockInt8, ChunkTopK, ErrorFeedback, Exact, PowerSGD, RandomBlock
from lightning_sync.compressors.random import draw, key_of
from lightning_sync.testing import make_specs, undelivered

BLOCK = 16


def ones(compressor: Any, steps: int, seed: int = 0, size: int = 50 * BLOCK, first: int = 0) -> list[torch.Tensor]:
    """What arrives of a gradient of ones, in each step."""
    world = SimulatedWorld(compressor, make_specs({"w": (size,)}, torch.float64), 2, seed)
    for state in world.states:
        state.step = first
    return [world.reduce([[torch.ones(size, dtype=torch.float64)]] * 2)[0][0] for _ in range(steps)]


def test_a_fixed_number_of_whole_blocks_is_sent_one_of_every_stretch() -> None:
    for sent in ones(RandomBlock(0.1, BLOCK), 20):
        blocks = sent.view(-1, BLOCK)
        assert bool((blocks == blocks[:, :1]).all())
        assert blocks[:, 0].view(5, 10).sum(1).tolist() == [1] * 5


def test_every_block_is_drawn_equally_often() -> None:
    """2,000 steps: each block's count within 5 standard deviations of 2,000/s."""
    steps = 2000
    counts = sum(ones(RandomBlock(0.1, BLOCK), steps)).view(-1, BLOCK)[:, 0]  # type: ignore[union-attr]
    spread = (steps * 0.1 * 0.9) ** 0.5
    assert float((counts - steps * 0.1).abs().max()) <= 5 * spread


def test_what_is_drawn_depends_on_seed_step_and_name_only() -> None:
    one, again, other = (ones(RandomBlock(0.1, BLOCK), 6, seed) for seed in (0, 0, 1))
    late = ones(RandomBlock(0.1, BLOCK), 3, 0, first=3)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[3:], late, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1])


def test_the_global_generator_plays_no_part() -> None:
    before = torch.get_rng_state()
    ones(RandomBlock(), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_drawn_numbers_are_uniform_and_independent() -> None:
    """Means of the number, of its low bits, and products of neighbours in key and step, within 5 sigma."""
    n = 40_000
    keys = torch.arange(n) + key_of(3, "w")
    now, later = draw(keys, 7), draw(keys, 8)
    assert int(now.min()) >= 0
    assert int(now.max()) < 2**31
    u, v = now.double() / 2**31 - 0.5, later.double() / 2**31 - 0.5
    sigma = 12**-0.5
    for value, deviation in (
        (u, sigma),
        ((now % 7).double() - 3, 2.0),
        (u * v, sigma**2),
        (u[1:] * u[:-1], sigma**2),
        ((now & 1).double() - 0.5, 0.5),
    ):
        assert abs(float(value.mean())) <= 5 * deviation / n**0.5


def test_unbiased_it_is_right_on_average_with_the_documented_variance() -> None:
    """One statistic over 1,500 draws: <C(x), x>/|x|^2 is 1 on average, |C(x) - x|^2/|x|^2 is s - 1, within 5 sigma."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50 * BLOCK, generator=generator, dtype=torch.float64)
    world = SimulatedWorld(RandomBlock(0.1, BLOCK, unbiased=True), make_specs({"w": x.shape}, torch.float64), 1)
    draws = [world.reduce([[x]])[0][0] for _ in range(1500)]
    for values, expected in (
        ([float(c @ x / (x @ x)) for c in draws], 1.0),
        ([float((c - x).square().sum() / (x @ x)) for c in draws], 9.0),
    ):
        error = np.std(values) / len(values) ** 0.5
        assert abs(np.mean(values) - expected) <= 5 * error, (np.mean(values), expected, error)


def test_stretches_of_unequal_length_are_unbiased_as_well() -> None:
    total = sum(ones(RandomBlock(0.3, BLOCK, unbiased=True), 2000, size=11 * BLOCK))
    spread = (3 * 2000) ** 0.5 * 1.5  # stretches of 3 or 4 blocks: variance s - 1 per step
    assert float((total - 2000).abs().max()) <= 5 * spread


def by_hand(steps: int, size: int, world_size: int, ratio: float) -> tuple[list[np.ndarray], list[torch.Tensor]]:
    """Error feedback around random blocks, from its definition: residuals, and the blocks read off a run on ones."""
    drawn = [s.numpy() > 0 for s in ones(RandomBlock(ratio, BLOCK), steps, size=size)]
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(world_size, size, generator=generator, dtype=torch.float64) for _ in range(steps)]
    residuals, results = np.zeros((world_size, size)), []
    for mask, gradients in zip(drawn, inputs, strict=True):
        residuals += gradients.numpy() / world_size
        results.append(np.where(mask, residuals.sum(0), 0))
        residuals[:, mask] = 0
    return results, inputs


@pytest.mark.parametrize("size", [50 * BLOCK, 50 * BLOCK - 5, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_with_feedback_it_is_the_reference(size: int, world_size: int) -> None:
    expected, inputs = by_hand(30, size, world_size, 0.2)
    world = SimulatedWorld(
        ErrorFeedback(RandomBlock(0.2, BLOCK)), make_specs({"w": (size,)}, torch.float64), world_size
    )
    for reference, gradients in zip(expected, inputs, strict=True):
        (out,) = world.reduce([[g] for g in gradients])[0]
        np.testing.assert_allclose(out.numpy(), reference, rtol=0, atol=1e-12)


# ---- chains


@pytest.mark.parametrize(
    "then", [Exact(), BlockInt8(BLOCK), BlockInt8(8), BlockInt8(24), ChunkTopK(0.2, 64, "2bit"), ChunkTopK(0.2, 32)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_chain_with_feedback_loses_nothing_on_either_end(then: Any, world_size: int) -> None:
    shapes = {"a": (40, 30), "b": (37, 31)}
    world = SimulatedWorld(
        ErrorFeedback(RandomBlock(0.3, 48, then)), make_specs(shapes, torch.float64), world_size, record=True
    )
    generator = torch.Generator().manual_seed(0)
    owed = [torch.zeros(s, dtype=torch.float64) for s in shapes.values()]
    for _ in range(8):
        mine = [
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes.values()]
            for _ in range(world_size)
        ]
        results = world.reduce(mine)[0]
        for i, out in enumerate(results):
            owed[i] += sum(g[i] for g in mine) / world_size - out
    for i, key in enumerate(shapes):
        torch.testing.assert_close(undelivered(world.states, key), owed[i].view(-1), rtol=0, atol=1e-12)
        assert float(owed[i].abs().max()) > 0


def test_a_chain_sends_what_the_second_compressor_makes_of_the_drawn_blocks() -> None:
    specs, topology = make_specs({"w": (400, BLOCK)}), Topology(0, (0, 1))
    assert RandomBlock(0.1, BLOCK).wire_bytes(specs, topology).sent == 4 * 40 * BLOCK
    assert RandomBlock(0.1, BLOCK, BlockInt8(BLOCK)).wire_bytes(specs, topology).sent == 40 * (BLOCK + 4)
    assert RandomBlock(0.1, BLOCK, BF16()).wire_bytes(specs, topology).sent == 2 * 40 * BLOCK


def test_int8_after_random_blocks_is_int8_of_the_drawn_blocks() -> None:
    x = torch.randn(50 * BLOCK, generator=torch.Generator().manual_seed(0))
    plain = SimulatedWorld(RandomBlock(0.2, BLOCK), make_specs({"w": x.shape}), 1).reduce([[x]])[0][0]
    chained = SimulatedWorld(RandomBlock(0.2, BLOCK, BlockInt8(BLOCK)), make_specs({"w": x.shape}), 1)
    (out,) = chained.reduce([[x]])[0]
    for row, sent in zip(plain.view(-1, BLOCK), out.view(-1, BLOCK), strict=True):
        scale = row.abs().max() / 127
        # Quantised twice, by the sender and by the owner: the second time changes nothing.
        torch.testing.assert_close(sent, (row / scale.clamp(min=1e-30)).round() * scale, rtol=1e-5, atol=1e-7)


# ---- overflows


def test_an_overflow_is_seen_in_the_steps_that_draw_its_block() -> None:
    drawn = [bool(out[1] != 0) for out in ones(RandomBlock(0.1, BLOCK), 60)]
    bad, good = torch.ones(2, 50 * BLOCK, dtype=torch.float64)
    bad[1] = float("inf")
    world = SimulatedWorld(RandomBlock(0.1, BLOCK), make_specs({"w": bad.shape}, torch.float64), 2)
    seen = [not bool(world.reduce([[bad], [good]])[0][0].isfinite().all()) for _ in range(60)]
    assert seen == drawn
    assert 1 <= sum(seen) < 20


def test_with_feedback_an_overflow_is_seen_once() -> None:
    good = torch.ones(50 * BLOCK)
    bad = good.clone()
    bad[1] = float("inf")
    world = SimulatedWorld(ErrorFeedback(RandomBlock(0.1, BLOCK)), make_specs({"w": good.shape}), 2)
    seen = []
    for step in range(120):
        (out,) = world.reduce([[bad if step == 2 else good], [good]])[0]
        seen.append(not bool(out.isfinite().all()))
    assert sum(seen) == 1
    assert not any(seen[:2])


# ---- options


@pytest.mark.parametrize(
    ("option", "value"),
    [("ratio", 0), ("ratio", 2), ("block", 4), ("block", 10**6), ("block", 16.0), ("unbiased", 1)],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"RandomBlock\({option}={value!r}\)"):
        RandomBlock(**{option: value})


@pytest.mark.parametrize("then", [ErrorFeedback(BlockInt8()), PowerSGD()])
def test_the_second_compressor_must_keep_nothing(then: Any) -> None:
    with pytest.raises(TypeError, match="must keep nothing between steps"):
        RandomBlock(then=then)


def test_unbiased_blocks_take_no_error_feedback() -> None:
    with pytest.raises(TypeError, match="cannot keep what it does not send"):
        ErrorFeedback(RandomBlock(unbiased=True))
    with pytest.raises(TypeError, match="expected a compressor"):
        RandomBlock(then="int8")  # type: ignore[arg-type]
