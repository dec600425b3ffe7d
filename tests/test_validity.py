"""One table decides what composes; it is what the README prints."""

import pytest

from lightning_sync import compressors
from lightning_sync.aggregators import Mean
from lightning_sync.compressors import BlockInt8, Exact, PowerSGD, Route
from lightning_sync.validity import MODES, PRECISIONS, REFUSALS, check_combination, refusal, table


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", list(compressors.registry))
def test_strict_takes_every_compressor_at_every_precision(name: str, precision: str) -> None:
    check_combination("strict", compressors.registry.build(name), Mean(), precision)


@pytest.mark.parametrize("compressor", [BlockInt8(), PowerSGD(), Route([("*", BlockInt8())])])
def test_inside_a_replica_gradients_are_averaged_exactly(compressor: object) -> None:
    with pytest.raises(
        ValueError, match=r"strategy='unwrapped' with compressor=.*averaged exactly; leave the compressor out"
    ):
        check_combination("unwrapped", compressor, Mean(), "32-true")  # type: ignore[arg-type]
    check_combination("unwrapped", Exact(), Mean(), "bf16-mixed")


def test_precisions_that_convert_gradients_themselves_are_refused_with_compression_only() -> None:
    assert refusal("strict", "int8", "mean", "transformer-engine") is not None
    assert refusal("strict", "none", "mean", "transformer-engine") is None


def test_every_refusal_has_a_reason_and_applies_to_something() -> None:
    precisions = [*PRECISIONS, "transformer-engine", "nf4", "fp4-dq", "int8-training"]
    for rule in REFUSALS:
        assert len(rule.reason) > 20
        assert any(
            rule.covers(mode, name, "mean", p) for mode in MODES for name in compressors.registry for p in precisions
        ), rule


def test_the_table_has_a_row_per_mode_and_compressor_and_a_column_per_precision() -> None:
    header, _, *rows = table(MODES).splitlines()
    assert header.count("|") == len(PRECISIONS) + 3
    assert len(rows) == len(MODES) * len(list(compressors.registry))
    assert rows[0].startswith("| strict | none | yes |")
    assert any("leave the compressor out" in row for row in rows)
