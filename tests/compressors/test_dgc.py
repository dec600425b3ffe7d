"""Deep gradient compression: momentum correction and masking against the paper's equations, clipping, warm-up."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import (
    BF16,
    BlockInt8,
    ChunkTopK,
    ErrorFeedback,
    Exact,
    LocalClipping,
    MomentumCorrection,
    PowerSGD,
    RandomBlock,
    RatioWarmup,
    dgc,
)
from lightning_sync.testing import make_specs

SHAPES = {"a": (16, 20), "b": (7, 50)}
CHUNK = 32


class Paper:
    """Lin et al. 2018, algorithm 4 without the clipping, for one parameter: dense arrays, every rank by itself."""

    def __init__(self, size: int, k: int, momentum: float, world_size: int) -> None:
        self.k, self.m, self.n = k, momentum, world_size
        self.u, self.v = (np.zeros((world_size, size)) for _ in range(2))

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = np.zeros(self.u.shape[1])
        for u, v, g in zip(self.u, self.v, gradients, strict=True):
            u *= self.m
            u += g / self.n
            v += u
            mask = np.zeros(len(v), dtype=bool)
            for start in range(0, len(v), CHUNK):
                part = np.abs(v[start : start + CHUNK])
                mask[start + np.argsort(-part)[: self.k]] = True
            total += np.where(mask, v, 0)
            v[mask] = 0
            u[mask] = 0
        return total


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_is_the_papers_algorithm(momentum: float, world_size: int) -> None:
    inner = ChunkTopK(0.1, CHUNK, pattern="gather", recall=1)
    world = SimulatedWorld(MomentumCorrection(inner, momentum), make_specs(SHAPES, torch.float64), world_size)
    papers = {k: Paper(torch.Size(s).numel(), inner.k, momentum, world_size) for k, s in SHAPES.items()}
    generator = torch.Generator().manual_seed(world_size)
    for _ in range(25):
        gradients = [
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES.values()]
            for _ in range(world_size)
        ]
        results = world.reduce(gradients)
        for i, key in enumerate(SHAPES):
            expected = papers[key].step([mine[i].numpy().ravel() for mine in gradients])
            for mine in results:
                # Values travel as float32; what that rounds off stays in v, and u is masked all the same.
                np.testing.assert_allclose(mine[i].numpy().ravel(), expected, rtol=2e-5, atol=1e-6)


def test_without_momentum_it_is_error_feedback() -> None:
    inner = ChunkTopK(0.1, CHUNK)
    worlds = [
        SimulatedWorld(c, make_specs(SHAPES), 4) for c in (MomentumCorrection(inner, momentum=0), ErrorFeedback(inner))
    ]
    for _ in range(6):
        mine = [[torch.randn(s) for s in SHAPES.values()] for _ in range(4)]
        one, other = (w.reduce(mine)[0] for w in worlds)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("inner", [ChunkTopK(0.1, CHUNK, "2bit"), RandomBlock(0.3, CHUNK, BlockInt8(16))])
def test_velocity_is_forgotten_where_something_was_sent_and_nowhere_else(inner: Any) -> None:
    world = SimulatedWorld(MomentumCorrection(inner), make_specs(SHAPES, torch.float64), 1)
    (state,) = world.states
    for step in range(3):
        old = {k: v.clone() for k, v in state.arenas["velocity"].items()}
        mine = [torch.randn(s, dtype=torch.float64) for s in SHAPES.values()]
        results = world.reduce([mine])[0]
        for key, gradient, sent in zip(SHAPES, mine, results, strict=True):
            expected = 0.9 * old[key] if step else 0
            expected = expected + gradient.view(-1)
            kept = state.arenas["velocity"][key]
            assert bool((kept[sent.view(-1) != 0] == 0).all())
            untouched = kept != 0
            torch.testing.assert_close(kept[untouched], expected[untouched])
            assert 0.5 < float(untouched.double().mean()) < 0.95


def test_a_step_with_nan_is_over_after_that_step() -> None:
    world = SimulatedWorld(MomentumCorrection(ChunkTopK(0.1, CHUNK)), make_specs(SHAPES), 2)
    wrong = []
    for step in range(6):
        mine = [[torch.randn(s) for s in SHAPES.values()] for _ in range(2)]
        if step == 2:
            mine[1][0][3, 4] = float("nan")
        if not all(bool(t.isfinite().all()) for t in world.reduce(mine)[0]):
            wrong.append(step)
    assert wrong == [2]


# ---- clipping


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("inner", [Exact(), ErrorFeedback(ChunkTopK(1.0, CHUNK))])
def test_every_ranks_gradient_is_clipped_to_its_part_of_the_norm(inner: Any, world_size: int) -> None:
    world = SimulatedWorld(LocalClipping(inner, max_norm=3.0), make_specs(SHAPES, torch.float64), world_size)
    scales = [0.001, 1.0, 100.0, 10.0]
    mine = [[torch.randn(s, dtype=torch.float64) * scales[r] for s in SHAPES.values()] for r in range(world_size)]
    results = world.reduce(mine)[0]
    for i, out in enumerate(results):
        clipped = [g[i] * min(1.0, 3.0 / world_size**0.5 / float(g[i].norm())) for g in mine]
        torch.testing.assert_close(out, sum(clipped) / world_size, rtol=1e-5, atol=1e-6)


def test_clipping_hides_neither_inf_nor_nan() -> None:
    for value in (float("inf"), float("nan")):
        world = SimulatedWorld(LocalClipping(BF16()), make_specs(SHAPES), 2)
        mine = [[torch.randn(s) for s in SHAPES.values()] for _ in range(2)]
        mine[1][0][0, 0] = value
        first, second = world.reduce(mine)[0]
        assert not bool(first.isfinite().all())
        assert bool(second.isfinite().all())


# ---- warm-up of the ratio


def test_the_ratio_falls_by_steps_and_the_residual_stays() -> None:
    warm = RatioWarmup(ChunkTopK(1 / 32, CHUNK, recall=1), ratios=(0.5, 0.25), every=2)
    specs, topology = make_specs({"w": (32, 32)}, torch.float64), Topology(0, (0, 1))
    world = SimulatedWorld(ErrorFeedback(warm), specs, 1)
    total = torch.zeros(32, 32, dtype=torch.float64)
    for step, k in enumerate([16, 16, 8, 8, 1, 1]):
        gradient = torch.randn(32, 32, dtype=torch.float64)
        (out,) = world.reduce([[gradient]])[0]
        total += gradient - out
        assert (out.view(-1, CHUNK) != 0).sum(1).tolist() == [k] * 32
        assert warm.wire_bytes(specs, topology, step).sent == 32 * k * 5
    assert warm.wire_bytes(specs, topology).sent == 32 * 5
    torch.testing.assert_close(total.view(-1), world.states[0].arenas["residual"]["w"], rtol=0, atol=1e-12)


def test_the_usual_numbers() -> None:
    made = dgc()
    assert isinstance(made.inner, RatioWarmup)
    assert made.momentum == 0.9
    assert made.inner.inner == ChunkTopK(ratio=0.001)
    assert [made.inner.at(s) for s in (0, 399, 400)] == [ChunkTopK(0.25), ChunkTopK(0.004), ChunkTopK(0.001)]


# ---- options


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: MomentumCorrection(ChunkTopK(), momentum=1.0), ValueError, r"momentum=1.0\): expected .* \[0, 1\)"),
        (lambda: MomentumCorrection(ChunkTopK(), momentum=-0.1), ValueError, "momentum=-0.1"),
        (lambda: MomentumCorrection(PowerSGD()), TypeError, "cannot keep what it does not send"),
        (lambda: MomentumCorrection("topk"), TypeError, "inner must be a Compressor"),  # type: ignore[arg-type]
        (lambda: LocalClipping(ChunkTopK(), max_norm=0), ValueError, "max_norm=0"),
        (lambda: RatioWarmup(ChunkTopK(), ratios=(0.5, 2)), ValueError, "ratios=2"),
        (lambda: RatioWarmup(ChunkTopK(), every=0), ValueError, "every=0"),
        (lambda: RatioWarmup(BlockInt8()), TypeError, "expected a compressor with a ratio"),
    ],
)
def test_wrong_options_are_named(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
