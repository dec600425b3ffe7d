"""PowerSGD against a plain implementation of the paper, with numpy's QR; and what it does with degenerate gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import Exact, PowerSGD
from lightning_sync.compressors.lowrank import orthogonalise_
from lightning_sync.testing import make_specs, undelivered

SHAPES = {"a": (40, 30), "conv": (16, 4, 3, 3), "b": (40, 30), "wide": (9, 100)}


class Paper:
    """Vogels et al. 2019, algorithms 1 and 2, one matrix at a time: error feedback around rank-r compression.

    Factors are only determined up to rotation; what is applied, P Q^T = P P^T M, is unique.
    """

    def __init__(self, factor: np.ndarray, world_size: int, residual: str) -> None:
        self.q, self.n, self.residual = factor, world_size, residual
        self.error: list[Any] = [0.0] * world_size

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        deltas = [g / self.n + e for g, e in zip(gradients, self.error, strict=True)]
        p, _ = np.linalg.qr(sum(d @ self.q for d in deltas))
        factors = [d.T @ p for d in deltas]
        self.q = sum(factors)
        mean = p @ self.q.T
        if self.residual == "local":
            self.error = [d - p @ f.T for d, f in zip(deltas, factors, strict=True)]
        else:
            self.error = [d - mean / self.n for d in deltas]
        return mean


def first_factors(compressor: PowerSGD, seed: int = 0) -> dict[str, np.ndarray]:
    """The factors that the first compressed step starts from, which depend on seed and name only."""
    state = compressor.init(make_specs(SHAPES, torch.float64))
    state.seed, state.step = seed, compressor.warmup_steps
    run = compressor.reduce(list(SHAPES), [torch.zeros(s, dtype=torch.float64) for s in SHAPES.values()], state)
    next(run)
    run.close()
    return {k: q.view(compressor.rank, -1).T.numpy().copy() for k, q in state.arenas["factor"].items()}


@pytest.mark.parametrize("residual", ["local", "aggregate"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_it_applies_is_the_papers(residual: Any, world_size: int) -> None:
    compressor = PowerSGD(rank=3, warmup_steps=2, residual=residual)
    world = SimulatedWorld(compressor, make_specs(SHAPES, torch.float64), world_size)
    factors = first_factors(compressor)
    papers = {k: Paper(q, world_size, residual) for k, q in factors.items()}
    generator = torch.Generator().manual_seed(1)
    for step in range(22):
        gradients = [
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES.values()]
            for _ in range(world_size)
        ]
        results = world.reduce(gradients)[0]
        for i, (key, result) in enumerate(zip(SHAPES, results, strict=True)):
            flat = [mine[i].reshape(len(mine[i]), -1).numpy() for mine in gradients]
            expected = sum(flat) / world_size if step < 2 else papers[key].step(flat)
            np.testing.assert_allclose(
                result.reshape(len(result), -1).numpy(), expected, rtol=0, atol=1e-8, err_msg=f"{key} at step {step}"
            )


def test_a_gradient_of_low_rank_arrives_whole() -> None:
    u, v = torch.randn(50, 2, dtype=torch.float64), torch.randn(2, 60, dtype=torch.float64)
    world = SimulatedWorld(PowerSGD(rank=2, warmup_steps=0), make_specs({"w": (50, 60)}, torch.float64), 2)
    (out,) = world.reduce([[u @ v], [u @ v * 3]])[0]
    assert torch.allclose(out, 2 * u @ v, atol=1e-9)


def test_zero_gradients_neither_divide_by_zero_nor_kill_a_factor() -> None:
    compressor = PowerSGD(rank=2, warmup_steps=0)
    world = SimulatedWorld(compressor, make_specs({"w": (50, 60)}), 2)
    for _ in range(3):
        (out,) = world.reduce([[torch.zeros(50, 60)]] * 2)[0]
        assert bool((out == 0).all())
    low_rank = torch.randn(50, 2) @ torch.randn(2, 60)
    for _ in range(4):
        (out,) = world.reduce([[low_rank]] * 2)[0]
        assert bool(out.isfinite().all())
    assert torch.allclose(out, low_rank, atol=1e-3), "after a few steps the subspace has been found again"


def test_a_gradient_of_rank_one_does_not_spoil_the_second_column() -> None:
    world = SimulatedWorld(PowerSGD(rank=4, warmup_steps=0), make_specs({"w": (50, 60)}), 2)
    one = torch.outer(torch.randn(50), torch.randn(60))
    for _ in range(3):
        (out,) = world.reduce([[one]] * 2)[0]
    assert torch.allclose(out, one, atol=1e-4)
    full = torch.randn(50, 60)
    total = torch.zeros(50, 60)
    for _ in range(60):
        total += world.reduce([[full]] * 2)[0][0]
    assert float((total / 60 - full).norm() / full.norm()) < 0.3


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 8), st.integers(0, 10**6))
def test_a_rank_above_a_side_changes_nothing_but_the_bytes(n: int, m: int, rank: int, seed: int) -> None:
    """Never NaN, and from the smaller side on the matrix arrives whole."""
    gradient = torch.randn(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    world = SimulatedWorld(PowerSGD(rank=rank, warmup_steps=0), make_specs({"w": (n, m)}, torch.float64), 2)
    total = torch.zeros_like(gradient)
    for _ in range(2):
        (out,) = world.reduce([[gradient]] * 2)[0]
        assert bool(out.isfinite().all())
        total += out
    assert torch.allclose(total + undelivered(world.states, "w").view(n, m), 2 * gradient, atol=1e-9)
    if rank >= min(n, m):
        assert torch.allclose(total, 2 * gradient, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 3), st.integers(0, 10**6))
def test_columns_become_orthonormal_also_when_they_depend_on_each_other(
    n: int, rank: int, dead: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(2, n, rank, generator=generator, dtype=torch.float64)
    columns[0, :, : min(dead, rank)] = 0
    columns[1, :, -1] = columns[1, :, 0]
    fallback = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    q = orthogonalise_(columns, fallback)
    kept = min(n, rank)
    gram = (q.mT @ q)[:, :kept, :kept]
    assert torch.allclose(gram, torch.eye(kept, dtype=torch.float64).expand_as(gram), atol=1e-6)
    assert bool((q[:, :, kept:] == 0).all())


def test_warm_up_is_exact_and_costs_as_much() -> None:
    compressor = PowerSGD(rank=2, warmup_steps=3)
    specs = make_specs(SHAPES)
    world = SimulatedWorld(compressor, specs, 2)
    exact = SimulatedWorld(Exact(), specs, 2)
    topology = Topology(0, (0, 1))
    for step in range(5):
        gradients = [[torch.randn(s) for s in SHAPES.values()] for _ in range(2)]
        same = [torch.equal(a, b) for a, b in zip(world.reduce(gradients)[0], exact.reduce(gradients)[0], strict=True)]
        assert same == [step < 3] * len(SHAPES)
        cheaper = compressor.wire_bytes(specs, topology, step).sent < Exact().wire_bytes(specs, topology).sent
        assert cheaper == (step >= 3)


def test_first_factors_depend_on_seed_and_name_only() -> None:
    one, again, other = (first_factors(PowerSGD(), seed) for seed in (0, 0, 1))
    assert all(np.array_equal(one[k], again[k]) for k in SHAPES)
    assert not np.array_equal(one["a"], one["b"])
    assert not any(np.array_equal(one[k], other[k]) for k in SHAPES)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rank", 0),
        ("rank", 1.0),
        ("rank", True),
        ("warmup_steps", -1),
        ("warmup_steps", None),
        ("min_ratio", 0.5),
        ("residual", "global"),
    ],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"PowerSGD\({option}={value!r}\)"):
        PowerSGD(**{option: value})
