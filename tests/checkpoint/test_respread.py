"""Whatever the number of ranks, of nodes, or the compressor: what is owed to the parameters stays the same in sum."""

import itertools

import pytest
import torch
from torch import Tensor

from lightning_sync.checkpoint.respread import Gathered, owed
from lightning_sync.compressors import BF16, BlockInt8, ChunkTopK, ErrorFeedback, PowerSGD, RandomBlock, Route, as_route
from lightning_sync.reducer import Reducer
from lightning_sync.state import Cover, ParamSpec
from tests.checkpoint.files import SHAPES, fill, rank_states, reducers

ROUTES = {
    "int8": as_route(ErrorFeedback(BlockInt8())),
    "int8 in other blocks": as_route(ErrorFeedback(BlockInt8(64))),
    "powersgd": as_route(PowerSGD(rank=2, warmup_steps=0)),
    "topk": as_route(ErrorFeedback(ChunkTopK(0.1, 256))),
    "random blocks": as_route(ErrorFeedback(RandomBlock(0.3, 64))),
    "both": Route([("a", PowerSGD(rank=1, warmup_steps=0)), ("*", ErrorFeedback(BlockInt8(64)))]),
}
WORLDS = [(0,), (0, 0), (0, 0, 0, 0), (0, 0, 0), (0, 0, 1, 1), (0, 0, 0, 1, 1, 1), (0, 1, 2)]
SIZES = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}


def by_hand(all_ranks: list[Reducer]) -> dict[str, Tensor]:
    """The sum of all residuals, worked out from the rule for who owns which block."""
    total = {name: torch.zeros(n, dtype=torch.float64) for name, n in SIZES.items()}
    for reducer in all_ranks:
        for state in reducer.states():
            saved = state.state_dict()
            for key, tensor in saved.get("residual", {}).items():
                spec = state.spec(key)
                start = spec.start or 0
                total[spec.name][start : start + spec.numel] += tensor[: spec.numel]
            for key, tensor in saved.get("owner_residual", {}).items():
                spec, block = state.spec(key), int(state.cache["block"])  # type: ignore[call-overload]
                first = state.cache["first_block"][key]  # type: ignore[index]
                owned = [i for i in range(-(-spec.numel // block)) if (first + i) % state.world_size == state.rank]
                for row, i in zip(tensor.view(-1, block), owned, strict=True):
                    start = (spec.start or 0) + i * block
                    n = min(block, spec.numel - i * block)
                    total[spec.name][start : start + n] += row[:n]
    return total


@pytest.mark.parametrize(("before", "after"), [*itertools.product(ROUTES, ROUTES)])
def test_sums_are_conserved(before: str, after: str) -> None:
    for old, new in itertools.product(WORLDS, WORLDS):
        saved = reducers(ROUTES[before], old)
        fill(saved)
        expected = by_hand(saved)
        gathered = Gathered.of(rank_states(saved), SIZES)
        for name, value in gathered.owed.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
        resumed = reducers(ROUTES[after], new)
        for reducer in resumed:
            taken, lost = gathered.shares(reducer)
            assert lost == [] or before != after, lost
            reducer.load_state_dict(taken)
        now = by_hand(resumed)
        for name, value in expected.items():
            assert float((now[name] - value).norm()) <= 1e-6 * float(value.norm()), (old, new, name)


def test_shares_are_even_and_factors_stay() -> None:
    saved = reducers(ROUTES["powersgd"], (0, 0))
    fill(saved)
    gathered = Gathered.of(rank_states(saved), SIZES)
    resumed = reducers(ROUTES["powersgd"], (0, 0, 0))
    taken = [gathered.shares(r)[0] for r in resumed]
    for name, factor in saved[0].state_dict()["factor"].items():
        assert all(torch.equal(t["factor"][name], factor) for t in taken)
        assert all(torch.equal(t["residual"][name], taken[0]["residual"][name]) for t in taken)


def test_what_nobody_can_take_over_is_named() -> None:
    saved = reducers(ROUTES["int8"], (0, 0))
    fill(saved)
    (plain,) = reducers(as_route(BF16()), (0,))
    taken, lost = Gathered.of(rank_states(saved), SIZES).shares(plain)
    assert taken == {}
    assert lost == ["what was owed to a, b, odd, since no compressor in use keeps a residual for them"]


def test_factors_of_another_rank_start_afresh() -> None:
    saved = reducers(as_route(PowerSGD(rank=1)), (0, 0))
    fill(saved)
    (resumed,) = reducers(as_route(PowerSGD(rank=2)), (0,))
    taken, lost = Gathered.of(rank_states(saved), SIZES).shares(resumed)
    assert set(taken) == {"residual"}
    assert lost == ["factor of 3 parameters, whose size is another one now"]


def test_unknown_kinds_are_kept_only_if_all_ranks_agree() -> None:
    states = rank_states(reducers(ROUTES["powersgd"], (0, 0)))
    for state in states:
        state.tensors = {"alike": {"a": torch.ones(2)}, "own": {"a": torch.full((2,), float(state.rank))}}
        state.covers = {}
    gathered = Gathered.of(states, SIZES)
    assert {kind for kind, tensors in gathered.replicated.items() if tensors} == {"alike"}
    assert gathered.local == {"own"}
    (resumed,) = reducers(ROUTES["powersgd"], (0,))
    assert gathered.shares(resumed) == ({}, ["own, which was each rank's own"])


def test_covers_of_slices() -> None:
    piece = ParamSpec("w", (100,), torch.float32, torch.device("cpu"), start=64)
    places, real = Cover.whole(piece, block=64).elements()
    assert places[real].tolist() == list(range(64, 164))
    assert len(places) == 128
    owner = Cover("w", 64, 100, first=1, stride=2, block=64)
    assert owner.rows == 1
    places, real = owner.elements()
    assert places[real].tolist() == list(range(128, 164))


def test_nothing_owed_is_nothing() -> None:
    assert owed(rank_states(reducers(as_route(BF16()), (0, 0))), SIZES) == {}
