"""A schedule changes compressors at a step, and loses nothing of what the one before still owed."""

from typing import Any

import pytest
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import (
    BF16,
    BlockInt4,
    BlockInt8,
    ErrorFeedback,
    Exact,
    PowerSGD,
    Route,
    Schedule,
    Sign,
)
from lightning_sync.compressors.resolve import to_route, with_feedback
from lightning_sync.state import State
from lightning_sync.testing import make_specs, undelivered

SHAPES = {"w": (30, 70), "v": (64, 40)}


def gradients(world: SimulatedWorld, seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in world.params]
        for _ in world.states
    ]


def test_each_phase_is_its_compressor() -> None:
    phases = [(0, Exact()), (2, BlockInt8()), (4, BF16())]
    specs = make_specs(SHAPES)
    world = SimulatedWorld(Schedule(phases), specs, 3)
    alone = {first: SimulatedWorld(c, specs, 3) for first, c in phases}
    for step in range(6):
        mine = gradients(world, step)
        expected = alone[step // 2 * 2].reduce(mine)[0]
        assert all(torch.equal(a, b) for a, b in zip(world.reduce(mine)[0], expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_one_phase_owes_the_next_one_delivers(dtype: torch.dtype) -> None:
    schedule = Schedule(
        [(0, ErrorFeedback(Sign(64))), (5, ErrorFeedback(BlockInt4(256))), (9, PowerSGD(2, 0)), (12, Exact())]
    )
    world = SimulatedWorld(schedule, make_specs(SHAPES, dtype), 3)
    missing = {k: torch.zeros(p.numel, dtype=torch.float64) for k, p in zip(SHAPES, world.params, strict=True)}
    for step in range(14):
        mine = gradients(world, step)
        results = world.reduce(mine)[0]
        for i, key in enumerate(SHAPES):
            meant = sum(g[i].double() for g in mine) / 3
            assert results[i].dtype == dtype
            missing[key] += (meant - results[i].double()).view(-1)
            if dtype == torch.float64:
                assert torch.allclose(undelivered(world.states, key), missing[key], atol=1e-10), f"step {step}"
        held = {kind for s in world.states for kind, tensors in s.state_dict().items() if tensors}
        assert all(kind.endswith(f" {sum(step >= s for s in (5, 9, 12))}") for kind in held), "old memory is given back"
    if dtype == torch.float64:
        assert all(float(m.abs().max()) < 1e-10 for m in missing.values()), "exact at last: everything is delivered"


def test_an_unused_parameter_keeps_what_it_is_owed_across_the_change() -> None:
    """`State.held` brings back what the old phase kept, and takes back what the new one began."""
    world = SimulatedWorld(
        Schedule([(0, ErrorFeedback(BlockInt4(64))), (1, ErrorFeedback(Sign(64)))]), make_specs(SHAPES), 2
    )
    world.reduce(gradients(world, 0))
    before = [s.state_dict() for s in world.states]
    owed = undelivered(world.states, "w")
    first, second = (s.held(["w"]) for s in world.states)
    with first, second:
        world.reduce(gradients(world, 1))
    after = [s.state_dict() for s in world.states]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old["residual 0"]["w"], new["residual 0"]["w"])
        assert "w" not in new["residual 1"]
        assert "v" in new["residual 1"]
    assert torch.equal(undelivered(world.states, "w"), owed)


def test_a_run_that_goes_on_after_the_change_has_the_same_bits() -> None:
    schedule = Schedule([(0, ErrorFeedback(BlockInt8())), (3, ErrorFeedback(Sign(64)))])
    world = SimulatedWorld(schedule, make_specs(SHAPES), 2)
    for saved_at in (2, 3, 5):
        while world.states[0].step < saved_at:
            world.reduce(gradients(world, world.states[0].step))
        again = SimulatedWorld(schedule, make_specs(SHAPES), 2)
        for state, saved in zip(again.states, world.states, strict=True):
            state.load_state_dict({kind: t for kind, t in saved.state_dict().items() if t})
            state.step = saved.step
        mine = gradients(world, 100)
        twin = [s.state_dict() for s in world.states]
        results = world.reduce(mine)[0]
        assert all(torch.equal(a, b) for a, b in zip(results, again.reduce(mine)[0], strict=True))
        for state, old in zip(world.states, twin, strict=True):  # as if that step had not been
            for arena in state.arenas.values():
                for name in [n for n, _ in arena.items()]:
                    arena.forget(name)
            state.load_state_dict({kind: t for kind, t in old.items() if t})
            state.step = saved_at


def test_bytes_are_those_of_the_phase() -> None:
    specs, topology = make_specs(SHAPES), Topology(0, (0, 1, 2))
    schedule = Schedule([(0, "none"), (300, "int4")])
    for step, compressor in ((0, Exact()), (299, Exact()), (300, BlockInt4()), (None, BlockInt4())):
        assert schedule.wire_bytes(specs, topology, step) == compressor.wire_bytes(specs, topology, step)


def test_feedback_is_wrapped_around_its_biased_phases() -> None:
    schedule = Schedule([(0, "none"), (300, "sign")])
    wrapped = Schedule([(0, Exact()), (300, ErrorFeedback(Sign()))])
    assert with_feedback(schedule) == wrapped
    assert to_route(Route([("w*", schedule)])).rules == (("w*", wrapped),)
    assert to_route(schedule, error_feedback=False).rules == (("*", schedule),)


def test_it_takes_what_all_its_compressors_take() -> None:
    specs = make_specs({"matrix": (64, 64), "vector": (64,)})
    assert [Schedule([(0, "bf16"), (5, "int8")]).accepts(p) for p in specs] == [True, False]
    assert Schedule([(0, "int8"), (5, Sign(24))]).alignment == 768
    assert Schedule([(0, "int8"), (5, "powersgd")]).alignment is None
    assert Schedule([(0, "int8"), (5, "int4")]).aggregates
    assert not Schedule([(0, "int8"), (5, "powersgd")]).aggregates


def test_state_says_which_phase_it_belongs_to() -> None:
    state: State = Schedule([(0, ErrorFeedback(BlockInt8())), (2, PowerSGD(2, 0))]).init(make_specs(SHAPES))
    state.declare()
    assert set(state.arenas) == {"residual 0", "owner_residual 0", "residual 1", "factor 1"}
    assert set(state.undelivered) == {"residual 0", "owner_residual 0", "residual 1"}


@pytest.mark.parametrize(
    ("phases", "error", "says"),
    [
        ([], ValueError, "expected pairs"),
        ([(0, "none", 3)], ValueError, "expected pairs"),
        ([(1, "none")], ValueError, "start at 0 and rise"),
        ([(0, "none"), (0, "int8")], ValueError, "start at 0 and rise"),
        ([(0, "none"), (5, "int8"), (4, "int4")], ValueError, "start at 0 and rise"),
        ([(0, "none"), (5.0, "int8")], ValueError, "start at 0 and rise"),
        ([(False, "none")], ValueError, "start at 0 and rise"),
        ([(0, "int9")], ValueError, "compressor='int9'"),
        ([(0, Route([]))], TypeError, "no compressor by itself"),
        ([(0, Schedule([(0, "none")]))], TypeError, "no compressor by itself"),
    ],
)
def test_wrong_phases_are_refused(phases: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Schedule(phases)
