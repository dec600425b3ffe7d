"""State belongs to parameters, by name: it survives any change of buckets, a save, and a step that must not count."""

import io
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sync.compressors import BlockInt8, ErrorFeedback, PowerSGD
from lightning_sync.state import Arena, ParamSpec, State, canonical_name
from lightning_sync.testing import make_specs

SIZES = {"a": 3, "b": 1, "c": 0, "d": 5}
CPU = torch.device("cpu")


@given(st.lists(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4, unique=True), max_size=12))
def test_an_arena_never_loses_a_value_whatever_is_bound_together(groups: list[list[str]]) -> None:
    arena = Arena(SIZES, torch.float64, CPU)
    written: dict[str, torch.Tensor] = {}
    for number, group in enumerate(groups, start=1):
        flat = arena.bind(group)
        assert flat.numel() == sum(SIZES[n] for n in group)
        expected = torch.cat([written.get(n, torch.zeros(SIZES[n], dtype=torch.float64)) for n in group])
        assert torch.equal(flat, expected), "values moved along, or started as zeros"
        flat.copy_(torch.arange(flat.numel()) + 10.0 * number)
        written.update(zip(group, flat.clone().split([SIZES[n] for n in group]), strict=True))
        assert arena.bind(group) is flat, "the same group is a look-up"
        assert {n: t.tolist() for n, t in arena.items()} == {n: t.tolist() for n, t in written.items()}


def test_a_forgotten_tensor_is_zeros_again_and_its_neighbours_stay() -> None:
    arena = Arena(SIZES, torch.float32, CPU)
    arena.bind(["a", "b"]).fill_(2)
    arena.forget("b")
    assert "b" not in arena
    assert arena.bind(["a", "b"]).tolist() == [2, 2, 2, 0]
    arena.forget("never bound")


@pytest.mark.parametrize(("name", "size"), [("unknown", 3), ("a", 4)])
def test_loading_a_foreign_tensor_is_an_error(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{size} elements"):
        Arena(SIZES, torch.float32, CPU).load({name: torch.zeros(size)})


def test_loading_an_unknown_kind_is_an_error() -> None:
    state = PowerSGD().init(make_specs({"w": (32, 32)}))
    with pytest.raises(ValueError, match=r"'momentum'.*factor.*residual"):
        state.load_state_dict({"momentum": {"w": torch.zeros(3)}})


def test_state_of_error_feedback_loads_before_the_first_step() -> None:
    """Its arenas depend on the rank and the number of ranks, which are known after `init`."""
    compressor = ErrorFeedback(BlockInt8())
    state = compressor.init(make_specs({"w": (5, 256)}))
    state.rank, state.world_size = 1, 2
    saved = {"residual": {"w": torch.ones(1280)}, "owner_residual": {"w": torch.full((512,), 2.0)}}
    state.load_state_dict(saved)
    loaded = state.state_dict()
    assert {k: float(v["w"].mean()) for k, v in loaded.items()} == {"residual": 1.0, "owner_residual": 2.0}


def test_a_saved_state_is_a_copy_of_tensors_and_strings_only() -> None:
    state = PowerSGD().init(make_specs({"w": (32, 32)}))
    flat = state.arenas["residual"].bind(["w"]).fill_(1)
    saved = state.state_dict()
    flat.zero_()
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    assert float(torch.load(buffer, weights_only=True)["residual"]["w"].sum()) == 1024


def test_held_brings_back_what_was_there_and_forgets_what_was_not() -> None:
    state = PowerSGD().init(make_specs({"old": (32, 32), "new": (32, 32), "other": (32, 32)}))
    residual = state.arenas["residual"]
    residual.bind(["old", "other"]).fill_(1)
    with suppress(ZeroDivisionError), state.held(["old", "new"]):
        residual.bind(["new", "old", "other"]).fill_(5)
        raise ZeroDivisionError
    assert float(residual["old"].mean()) == 1
    assert "new" not in residual
    assert float(residual["other"].mean()) == 5


def test_held_covers_arenas_that_do_not_exist_yet() -> None:
    compressor = ErrorFeedback(BlockInt8())
    state = compressor.init(make_specs({"w": (4, 256)}))
    with state.held(["w"]):
        list_of_rounds = compressor.reduce(["w"], [torch.randn(4, 256)], state)
        next(list_of_rounds)
    assert state.state_dict() == {"residual": {}, "owner_residual": {}}


def test_specs_of_slices() -> None:
    spec = ParamSpec("w", (4, 6), torch.bfloat16, CPU)
    assert spec.slice(0, 24) is spec
    piece = spec.slice(8, 20)
    assert (piece.key, piece.shape, piece.numel) == ("w[8:20]", (12,), 12)
    assert spec.state_dtype == torch.float32
    assert ParamSpec("w", (1,), torch.float64, CPU).state_dtype == torch.float64
    assert State((spec, piece)).spec("w[8:20]") is piece


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module.a.weight", "a.weight"),
        ("_orig_mod.a.weight", "a.weight"),
        ("module.a._orig_mod.b", "a.b"),
        ("a.b", "a.b"),
    ],
)
def test_wrappers_leave_no_trace_in_names(wrapped: str, plain: str) -> None:
    assert canonical_name(wrapped) == plain
