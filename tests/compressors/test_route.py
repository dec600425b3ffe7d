"""Rules decide in order; what no compressor wants travels exactly."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_sync.comm.simulated import SimulatedWorld
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
    Route,
    Where,
    as_route,
    registry,
)
from lightning_sync.compressors.resolve import to_route
from lightning_sync.ddp_hook import param_specs
from lightning_sync.state import ParamSpec
from lightning_sync.testing import make_specs

SHAPES = {"embed.weight": (100, 32), "a.weight": (64, 64), "a.bias": (64,), "small.weight": (8, 8)}


def table(route: Route) -> dict[str, str]:
    return {p.name: type(c).__name__ for c, members in route.assign(make_specs(SHAPES)) for p in members}


def test_the_first_rule_that_matches_decides() -> None:
    route = Route([("embed*", BF16()), (lambda p: p.numel > 4000, PowerSGD()), ("*", BlockInt8())])
    assert table(route) == {"embed.weight": "BF16", "a.weight": "PowerSGD", "a.bias": "Exact", "small.weight": "Exact"}
    assert table(Route([])) == dict.fromkeys(SHAPES, "Exact")


def test_vectors_and_small_matrices_travel_exactly_by_default() -> None:
    assert table(as_route(BlockInt8()))["a.bias"] == "Exact"
    assert table(as_route(PowerSGD()))["small.weight"] == "Exact"
    assert table(as_route(BF16())) == dict.fromkeys(SHAPES, "BF16"), "a cast costs nothing: it takes everything"


def test_rules_by_size_axes_and_role() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Conv2d(4, 8, 3), nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(4, 4))
    specs = [spec for spec, _ in param_specs(model)]
    assert [s.role for s in specs] == [type(m).__name__ for m in model for _ in m.parameters()]

    def chosen(rule: Where) -> list[str]:
        return [s.name for s in specs if rule(s)]

    assert chosen(Where(role="Embedding")) == ["0.weight"]
    assert chosen(Where(role="*Norm*")) == ["3.weight", "3.bias"]
    assert chosen(Where(name="[24].*", min_dims=2)) == ["2.weight", "4.weight"]
    assert chosen(Where(min_dims=4)) == ["1.weight"]
    assert chosen(Where(min_dims=2, max_dims=2, min_numel=100)) == ["0.weight", "2.weight"]
    assert chosen(Where(max_numel=8)) == ["1.bias", "4.bias"]
    route = Route([(Where(role="Embedding"), BF16()), (Where(min_dims=2, max_numel=2000), PowerSGD(rank=1))])
    assert {p.name: type(c).__name__ for c, members in route.assign(specs) for p in members} == {
        **{s.name: "Exact" for s in specs},
        "0.weight": "BF16",
        "1.weight": "PowerSGD",
        "2.weight": "PowerSGD",
        "4.weight": "PowerSGD",
    }


def test_a_slice_keeps_its_parameters_role() -> None:
    spec = ParamSpec("w", (10, 10), torch.float32, torch.device("cpu"), role="Linear")
    assert spec.slice(20, 30) == ParamSpec("w", (10,), torch.float32, torch.device("cpu"), start=20, role="Linear")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_numel": -1}, "min_numel=-1"),
        ({"min_dims": 1.0}, "min_dims=1.0"),
        ({"min_numel": 5, "max_numel": 4}, r"max_numel=4\): expected an integer of at least 5"),
        ({"max_dims": True}, "max_dims=True"),
    ],
)
def test_a_rule_that_can_hold_for_nothing_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Where(**options)


def test_a_rank_for_each_parameter_is_a_route_and_one_collective_a_round() -> None:
    route = Route([("embed*", PowerSGD(rank=8, warmup_steps=0)), ("*", PowerSGD(rank=1, warmup_steps=0))])
    assigned = route.assign(make_specs({"embed.weight": (100, 64), "a.weight": (64, 64), "a.bias": (64,)}))
    assert [(c, [p.name for p in members]) for c, members in assigned] == [
        (PowerSGD(rank=8, warmup_steps=0), ["embed.weight"]),
        (PowerSGD(rank=1, warmup_steps=0), ["a.weight"]),
        (Exact(), ["a.bias"]),
    ]


def test_equal_compressors_serve_their_parameters_together_in_registration_order() -> None:
    route = Route([("embed*", BF16()), ("a.*", Exact()), ("*", BF16())])
    assigned = [(c, [p.name for p in members]) for c, members in route.assign(make_specs(SHAPES))]
    assert assigned == [(BF16(), ["embed.weight", "small.weight"]), (Exact(), ["a.weight", "a.bias"])]


def test_dtypes_whose_state_differs_are_served_apart() -> None:
    specs = [
        ParamSpec(str(d), (64, 64), d, torch.device("cpu")) for d in (torch.float32, torch.float64, torch.bfloat16)
    ]
    members = [[p.dtype for p in m] for _, m in as_route(PowerSGD()).assign(specs)]
    assert members == [[torch.float32, torch.bfloat16], [torch.float64]]


@pytest.mark.parametrize(
    ("written", "used"),
    [
        (BlockInt8(), ErrorFeedback(BlockInt8())),
        (ChunkTopK(), ErrorFeedback(ChunkTopK())),
        (RandomBlock(), ErrorFeedback(RandomBlock())),
        (RatioWarmup(ChunkTopK()), ErrorFeedback(RatioWarmup(ChunkTopK()))),
        (LocalClipping(ChunkTopK()), ErrorFeedback(LocalClipping(ChunkTopK()))),
        *((c, c) for c in (PowerSGD(), BF16(), RandomBlock(unbiased=True), MomentumCorrection(ChunkTopK()))),
        (LocalClipping(PowerSGD()), LocalClipping(PowerSGD())),
        (ErrorFeedback(BlockInt8(), decay=0.5), ErrorFeedback(BlockInt8(), decay=0.5)),
    ],
    ids=repr,
)
def test_error_feedback_is_wrapped_around_what_is_biased_and_can_remember(written: Any, used: Any) -> None:
    route = Route([("a*", written)])
    assert [c for _, c in to_route(route).rules] == [used]
    assert to_route(route, error_feedback=False) == route


@pytest.mark.parametrize("wrong", ["int9", "", 3, None, BlockInt8])
def test_a_wrong_name_lists_what_is_accepted(wrong: object) -> None:
    with pytest.raises(
        ValueError, match=r"compressor=.*expected one of none, bf16, fp16, fp8, int8, .*powersgd, .* or an instance"
    ):
        registry.build(wrong)  # type: ignore[arg-type]


def test_a_rule_without_a_compressor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compressor=8: expected one of none, bf16"):
        Route([("*", 8)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"rule '\*' is Route.*not a Compressor"):
        Route([("*", Route([]))])  # type: ignore[list-item]


def test_names_cannot_be_taken_twice() -> None:
    with pytest.raises(ValueError, match="already registered"):
        registry.register("int8", BlockInt8)
    assert registry.name(BlockInt8(64)) == "int8"
    assert registry.name(Route([])) == "Route"


@pytest.mark.parametrize("compressor", ["bf16", "int8", "sign", "powersgd"])
def test_complex_numbers_travel_exactly(compressor: str) -> None:
    spec = ParamSpec("spectrum", (64, 64), torch.complex64, torch.device("cpu"))
    assert [type(c) for c, _ in as_route(registry.build(compressor)).assign([spec])] == [Exact]
    world = SimulatedWorld(Exact(), [spec], 2)
    a, b = (torch.randn(64, 64, dtype=torch.complex64) for _ in range(2))
    assert torch.allclose(world.reduce([[a], [b]])[0][0], (a + b) / 2)
