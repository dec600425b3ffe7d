"""ACP-SGD against a plain implementation of the paper, with numpy's QR; turns that survive resumes and odd steps."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import AcpSGD, Exact, PowerSGD
from lightning_sync.testing import make_specs, undelivered

SHAPES = {"a": (40, 30), "conv": (16, 4, 3, 3), "b": (40, 30), "wide": (9, 100)}


class Paper:
    """Zhang et al. 2023: one factor per step, of the gradient plus the local residual, one matrix at a time."""

    def __init__(self, first: np.ndarray, world_size: int) -> None:
        self.factor, self.n, self.turn = first, world_size, 0
        self.error: list[Any] = [0.0] * world_size

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        deltas = [g / self.n + e for g, e in zip(gradients, self.error, strict=True)]
        if self.turn:
            deltas = [d.T for d in deltas]
        fixed, _ = np.linalg.qr(self.factor)
        own = [d @ fixed for d in deltas]
        self.error = [d - f @ fixed.T for d, f in zip(deltas, own, strict=True)]
        self.factor = sum(own)
        mean = self.factor @ fixed.T
        if self.turn:
            mean, self.error = mean.T, [e.T for e in self.error]
        self.turn = 1 - self.turn
        return mean


def first_factors(compressor: AcpSGD) -> dict[str, np.ndarray]:
    """The factors that the first compressed step starts from, before they are made orthonormal: their span counts."""
    state = compressor.init(make_specs(SHAPES, torch.float64))
    state.step = compressor.warmup_steps
    next(compressor.reduce(list(SHAPES), [torch.zeros(s, dtype=torch.float64) for s in SHAPES.values()], state))
    return {k: q.view(compressor.rank, -1).T.numpy().copy() for k, q in state.arenas["right"].items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 4])
def test_what_it_applies_is_the_papers(world_size: int, stride: int) -> None:
    """Also when only every fourth step is reduced, as between exchanges of replicas."""
    compressor = AcpSGD(rank=3, warmup_steps=4)
    world = SimulatedWorld(compressor, make_specs(SHAPES, torch.float64), world_size)
    papers = {k: Paper(q, world_size) for k, q in first_factors(compressor).items()}
    generator = torch.Generator().manual_seed(1)
    for step in range(0, 22 * stride, stride):
        for state in world.states:
            state.step = step
        gradients = [
            [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES.values()]
            for _ in range(world_size)
        ]
        results = world.reduce(gradients)[0]
        for i, (key, result) in enumerate(zip(SHAPES, results, strict=True)):
            flat = [mine[i].reshape(len(mine[i]), -1).numpy() for mine in gradients]
            expected = sum(flat) / world_size if step < 4 else papers[key].step(flat)
            np.testing.assert_allclose(
                result.reshape(len(result), -1).numpy(), expected, rtol=0, atol=1e-8, err_msg=f"{key} at step {step}"
            )


def test_a_gradient_of_low_rank_has_arrived_whole_after_both_turns() -> None:
    u, v = torch.randn(50, 2, dtype=torch.float64), torch.randn(2, 60, dtype=torch.float64)
    world = SimulatedWorld(AcpSGD(rank=2, warmup_steps=0), make_specs({"w": (50, 60)}, torch.float64), 2)
    total = torch.zeros(50, 60, dtype=torch.float64)
    for step in range(1, 7):
        total += world.reduce([[u @ v], [u @ v * 3]])[0][0]
        assert torch.allclose(total, step * 2 * u @ v, atol=1e-8) == (step % 2 == 0)


def test_zero_gradients_neither_divide_by_zero_nor_kill_a_factor() -> None:
    world = SimulatedWorld(AcpSGD(rank=2, warmup_steps=0), make_specs({"w": (50, 60)}), 2)
    for _ in range(4):
        (out,) = world.reduce([[torch.zeros(50, 60)]] * 2)[0]
        assert bool((out == 0).all())
    low_rank = torch.randn(50, 2) @ torch.randn(2, 60)
    total = torch.zeros(50, 60)
    for _ in range(6):
        total += world.reduce([[low_rank]] * 2)[0][0]
    assert torch.allclose(total, 6 * low_rank, atol=1e-2)


def test_each_step_sends_one_factor_and_half_of_powersgds_bytes() -> None:
    specs, topology = make_specs(SHAPES), Topology(0, (0, 1))
    acp, power = AcpSGD(rank=2, warmup_steps=1), PowerSGD(rank=2, warmup_steps=1)
    assert acp.wire_bytes(specs, topology, 0) == Exact().wire_bytes(specs, topology)
    turns = [acp.wire_bytes(specs, topology, step).sent for step in (1, 2, 3)]
    assert turns[0] == turns[2] != turns[1]
    assert turns[0] + turns[1] == power.wire_bytes(specs, topology).sent == 2 * acp.wire_bytes(specs, topology).sent
    world = SimulatedWorld(acp, specs, 2, record=True)
    for step in range(5):
        world.reduce([[torch.randn(s) for s in SHAPES.values()]] * 2)
        assert len(world.sent) == 1, "one reduction a step"
        if step:
            assert sum(t.nbytes for t in world.sent[0][0].tensors) == turns[1 - step % 2]


def test_a_parameter_that_sat_out_a_step_takes_its_turn_later() -> None:
    """Its neighbours go on; nothing is lost."""
    specs = make_specs(SHAPES, torch.float64)
    world = SimulatedWorld(AcpSGD(rank=2, warmup_steps=0), specs, 2)
    owed = {k: torch.zeros(torch.Size(s).numel(), dtype=torch.float64) for k, s in SHAPES.items()}
    generator = torch.Generator().manual_seed(0)
    for step in range(7):
        mine = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES.values()] for _ in range(2)]
        held = ["b"] if step in (1, 2, 4) else []
        contexts = [state.held(held) for state in world.states]
        for context in contexts:
            context.__enter__()
        results = world.reduce(mine)[0]
        for context in contexts:
            context.__exit__(None, None, None)
        for i, key in enumerate(SHAPES):
            if key not in held:
                owed[key] += ((mine[0][i] + mine[1][i]) / 2 - results[i]).view(-1)
    turns = {k: int(t) for k, t in world.states[0].arenas["turn"].items()}
    assert turns == {"a": 1, "conv": 1, "b": 0, "wide": 1}
    for key, value in owed.items():
        torch.testing.assert_close(undelivered(world.states, key), value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("option", "value"),
    [("rank", 0), ("rank", 2.0), ("warmup_steps", -1), ("min_ratio", 0.5), ("min_ratio", "2")],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"AcpSGD\({option}={value!r}\)"):
        AcpSGD(**{option: value})
