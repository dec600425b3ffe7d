"""One table decides what composes; it is what the README prints."""

import re
from itertools import product

import pytest

from lightning_sync import compressors
from lightning_sync.aggregators import Mean
from lightning_sync.compressors import BlockInt8, Exact, PowerSGD, Route
from lightning_sync.validity import PRECISIONS, REFUSALS, WRAPPERS, check_combination, refusal, table

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
    cases = list(product(MODES, compressors.registry, ["mean"], precisions, WRAPPERS))
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
