"""One table decides what composes; it is what the README prints."""

import re
from itertools import product

import pytest

from lightning_sync import aggregators, compressors
from lightning_sync.aggregators import Adasum, MajorityVote, Mean, Median, Sum
from lightning_sync.compressors import BF16, FP16, BlockInt8, Exact, PowerSGD, Route
from lightning_sync.validity import (
    PRECISIONS,
    REFUSALS,
    WRAPPERS,
    aggregator_table,
    check_combination,
    refusal,
    table,
)

MODES = ("strict", "unwrapped")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", list(compressors.registry))
def test_strict_takes_every_compressor_at_every_precision(name: str, precision: str) -> None:
    check_combination("strict", compressors.registry.build(name), Mean(), precision)


@pytest.mark.parametrize("compressor", [BlockInt8(), PowerSGD(), Route([("*", BlockInt8())])])
def test_inside_a_replica_gradients_are_averaged_exactly(compressor: object) -> None:
    with pytest.raises(ValueError, match=r"strategy='unwrapped' with compressor=.*averaged exactly; leave it out"):
        check_combination("unwrapped", compressor, Mean(), "32-true")  # type: ignore[arg-type]
    check_combination("unwrapped", Exact(), Mean(), "bf16-mixed")


def test_precisions_that_convert_gradients_themselves_are_refused_with_compression_only() -> None:
    assert refusal("strict", "int8", "mean", "transformer-engine") is not None
    assert refusal("strict", "none", "mean", "transformer-engine") is None


def test_every_refusal_has_a_reason_and_applies_to_something() -> None:
    precisions = [*PRECISIONS, "transformer-engine", "nf4", "fp4-dq", "int8-training"]
    modes = ("strict", "hybrid", "delayed", "asynchronous", "unwrapped")
    cases = list(product(modes, compressors.registry, aggregators.registry, precisions, WRAPPERS))
    for rule in REFUSALS:
        assert len(rule.reason) > 20
        assert any(rule.covers(*case) for case in cases), rule


@pytest.mark.parametrize("wrapper", WRAPPERS[1:])
def test_wrappers_that_shard_or_reduce_themselves_are_refused(wrapper: str) -> None:
    assert refusal("strict", "none", "mean", "32-true", wrapper) is not None


def test_the_table_has_a_row_per_mode_and_compressor_and_a_column_per_precision_and_wrapper() -> None:
    text = table(MODES)
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert header.count("|") == len(PRECISIONS) + len(WRAPPERS) - 1 + 3
    named = [row.split("|")[1:3] for row in rows]
    covered = [(mode.strip(), name.strip()) for modes, name in named for mode in modes.split(",")]
    assert sorted(covered) == sorted(product(MODES, compressors.registry)), "each once, modes that agree in one row"
    assert rows[0].startswith("| strict, unwrapped | none | yes |")
    for number in {n for row in rows for n in re.findall(r"no \((\d+)\)", row)}:
        assert re.search(rf"^\({number}\) .{{20,}}", text, re.MULTILINE), f"reason {number} is given below the table"


# ---- aggregators


@pytest.mark.parametrize("compressor", [PowerSGD(), FP16(), Route([("a*", BlockInt8()), ("*", PowerSGD())])])
@pytest.mark.parametrize("aggregator", [Median(), Adasum(), MajorityVote()])
def test_what_is_a_sum_on_the_wire_is_refused_by_aggregators_that_see_every_contribution(
    compressor: object, aggregator: object
) -> None:
    with pytest.raises(ValueError, match=r"is refused: it is a sum on the wire, which hides each rank's contribution"):
        check_combination("strict", compressor, aggregator, "32-true")  # type: ignore[arg-type]


@pytest.mark.parametrize("compressor", [Exact(), BF16(), BlockInt8(), Route([("a*", BlockInt8())])])
@pytest.mark.parametrize("mode", ["strict", "delayed", "hybrid"])
def test_aggregators_take_what_is_exchanged_or_can_be(mode: str, compressor: object) -> None:
    for aggregator in (Mean(), Sum(), Median(), Adasum()):
        check_combination(mode, compressor, aggregator, "32-true")  # type: ignore[arg-type]


def test_a_sum_goes_with_everything_that_a_mean_goes_with() -> None:
    for name in compressors.registry:
        assert refusal("strict", name, "sum", "32-true") is None


def test_modes_refuse_aggregators_that_mean_nothing_to_them() -> None:
    with pytest.raises(ValueError, match=r"aggregator='majority_vote'.*refused: votes have no size"):
        check_combination("hybrid", Exact(), MajorityVote(), "32-true")
    with pytest.raises(ValueError, match=r"strategy='unwrapped'.*aggregator='median'.*averaged exactly; leave it out"):
        check_combination("unwrapped", Exact(), Median(), "32-true")
    assert refusal("strict", "none", "median", "transformer-engine") is not None


def test_the_table_of_aggregators_has_a_row_per_mode_and_aggregator_and_a_column_per_compressor() -> None:
    header, _, *rows = [line for line in aggregator_table().splitlines() if line.startswith("|")]
    assert header == f"| strategy | aggregator | {' | '.join(compressors.registry)} |"
    named = [row.split("|")[1:3] for row in rows]
    covered = [(mode.strip(), name.strip()) for modes, name in named for mode in modes.split(",")]
    assert sorted(covered) == sorted(product(("strict", "hybrid", "delayed", "asynchronous"), aggregators.registry))
    assert any("median" in row and "| yes | yes | no (" in row for row in rows)
