"""Every mode, with every compressor it takes: a run that is resumed is the run that was never interrupted, by bits."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import lightning_sync as ls
from lightning_sync.strategies import NAMES, SyncStrategy
from tests.checkpoint.modes import Anchored
from tests.checkpoint.runs import differences, run
from tests.workers import run_ranks

COMPRESSORS: dict[str, Any] = {
    "none": None,
    "int8": "int8",
    "powersgd": ls.PowerSGD(rank=2, warmup_steps=1),
}
_KEPT = {"none": set(), "int8": {"residual", "owner_residual"}, "powersgd": {"residual", "factor"}}


@dataclass
class Mode:
    """A line of the table: how to make the strategy with a compressor, and what must not be empty at its end.

    `kept` are kinds of state beside the compressor's.
    """

    make: Callable[[Any], SyncStrategy]
    compressors: Sequence[str] = tuple(COMPRESSORS)
    kept: set[str] = field(default_factory=set)


#: A mode joins by its line here; a name that is registered and has no line fails a test.
MODES: dict[str, Mode] = {
    "strict": Mode(lambda c: ls.StrictStrategy(c, bucket_cap_mb=0.005)),
    "unwrapped": Mode(lambda c: ls.UnwrappedStrategy(c, replica="rank"), ["none"]),
    "anchored": Mode(lambda c: Anchored(c, replica="rank"), ["none"], {"anchor", "velocity"}),
}
CASES = [
    (mode, compressor, accumulate, optimizer)
    for mode, line in MODES.items()
    for compressor, accumulate, optimizer in itertools.product(line.compressors, (1, 2), ("SGD", "AdamW"))
]


def matrix(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for mode, compressor, accumulate, optimizer in CASES:
        name = f"{mode}, {compressor}, accumulate {accumulate}, {optimizer}"
        line, place = MODES[mode], folder / name
        options: dict[str, Any] = {
            "model": {"adam": optimizer == "AdamW", "lr": 1e-2, "depth": 2},
            "accumulate_grad_batches": accumulate,
            "epochs": 2,
        }
        whole = run(line.make(COMPRESSORS[compressor]), world_size, folder=place, **options)
        again = run(line.make(COMPRESSORS[compressor]), world_size, resume=place / "epoch=0.ckpt", seed=99, **options)
        found[name] = differences(whole, again)
        for kind in sorted(_KEPT[compressor] | line.kept):
            if not any(float(t.abs().sum()) for t in whole.state.get(kind, {}).values()):
                found[name].append(f"{kind} is empty: nothing is tested")
        if len(again.losses) * 2 != len(whole.losses):
            found[name].append(f"{len(again.losses)} steps after {len(whole.losses)}")
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_mode_goes_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    for found in run_ranks(matrix, world_size, tmp_path, init="env", deadline=170):
        assert found == {name: [] for name in found}
        assert len(found) == len(CASES)


def test_every_registered_mode_has_a_line() -> None:
    assert set(NAMES) <= set(MODES)
