"""Rules decide in order; what no compressor wants travels exactly."""

import pytest
import torch

from lightning_sync.compressors import BF16, BlockInt8, ErrorFeedback, Exact, PowerSGD, Route, as_route, registry
from lightning_sync.compressors.resolve import to_route
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


def test_error_feedback_is_wrapped_around_biased_codecs_only() -> None:
    route = Route([("a*", BlockInt8()), ("b*", PowerSGD()), ("c*", ErrorFeedback(BlockInt8(), decay=0.5))])
    assert [c for _, c in to_route(route).rules] == [
        ErrorFeedback(BlockInt8()),
        PowerSGD(),
        ErrorFeedback(BlockInt8(), decay=0.5),
    ]
    assert to_route(route, error_feedback=False) == route


@pytest.mark.parametrize("wrong", ["int9", "", 3, None, BlockInt8])
def test_a_wrong_name_lists_what_is_accepted(wrong: object) -> None:
    with pytest.raises(
        ValueError, match=r"compressor=.*expected one of none, bf16, fp16, int8, powersgd, or an instance"
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
