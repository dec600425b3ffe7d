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
    "acp": ls.AcpSGD(rank=2, warmup_steps=1),
    "topk": ls.ChunkTopK(ratio=0.1, chunk=256),
}
FEW_BITS: dict[str, Any] = {
    "int4": "int4",
    "int4 at random": ls.BlockInt4(stochastic=True),
    "sign": "sign",
    "schedule": ls.Schedule([(0, "int8"), (2, "sign")]),
}
_BLOCKS = {"residual", "owner_residual"}
_KEPT = {
    "none": set(),
    "int8": _BLOCKS,
    "powersgd": {"residual", "factor"},
    "acp": {"residual", "left", "right"},
    "topk": _BLOCKS,
    "int4": _BLOCKS,
    "int4 at random": set(),
    "sign": _BLOCKS,
    "schedule": {"residual 1", "owner_residual 1"},
}


@dataclass
class Mode:
    """A line of the table: how to make the strategy with a compressor, and what must not be empty at its end.

    `kept` are kinds of state beside the compressor's.
    """

    make: Callable[[Any], SyncStrategy]
    compressors: Sequence[str] = tuple(COMPRESSORS)
    kept: set[str] = field(default_factory=set)


def _named(name: str, **options: Any) -> Callable[[Any], SyncStrategy]:
    return lambda c: ls.strategy(name, compressor=c, **options)


_OFTEN: dict[str, Any] = {"sync_every": 3, "replica": "rank", "warmup_steps": 1}
_OVERLAP: dict[str, Any] = {"sync_every": 4, "fragments": 2, "overlap_steps": 1}
# Only ranks that go in step make the same run twice.
_IN_STEP: dict[str, Any] = {"sync_every": 3, "max_staleness": 0, "blocking": True}
#: A mode joins by its line here; a name that is registered and has no line fails a test.
MODES: dict[str, Mode] = {
    "strict": Mode(lambda c: ls.StrictStrategy(c, bucket_cap_mb=0.005)),
    "unwrapped": Mode(lambda c: ls.UnwrappedStrategy(c, replica="rank"), ["none"]),
    "anchored": Mode(lambda c: Anchored(c, replica="rank"), ["none"], {"anchor", "velocity"}),
    "delayed": Mode(_named("delayed")),
    "hybrid": Mode(_named("hybrid", **_OFTEN), kept={"anchor"}),
    "local_sgd": Mode(_named("local_sgd", **_OFTEN), kept={"anchor"}),
    "weighted": Mode(
        lambda c: ls.HybridStrategy(c, aggregator="weighted_mean", **_OFTEN), ["none", "int8"], kept={"anchor"}
    ),
    "post_local_sgd": Mode(_named("post_local_sgd", **_OFTEN), kept={"anchor"}),
    "hierarchical": Mode(_named("hierarchical", **_OFTEN), kept={"anchor"}),
    "diloco": Mode(_named("diloco", **_OFTEN), kept={"anchor"}),
    "streaming_diloco": Mode(_named("streaming_diloco", **_OFTEN | _OVERLAP), kept={"anchor"}),
    "slowmo": Mode(_named("slowmo", **_OFTEN), kept={"anchor"}),
    "easgd": Mode(_named("easgd", **_OFTEN), kept={"anchor"}),
    "async": Mode(_named("async", **_IN_STEP), ["none"], kept={"shard"}),
    "asynchronous": Mode(
        _named("asynchronous", push="gradient", **{**_IN_STEP, "sync_every": 1}), ["none"], kept={"shard", "moments"}
    ),
    "ssp": Mode(_named("ssp", rule="delay_compensated", **_IN_STEP), ["none"], kept={"shard", "rule"}),
    "async_diloco": Mode(_named("async_diloco", warmup_steps=1, **_IN_STEP), ["none"], kept={"shard", "rule"}),
    # With accumulation this is saved while warming up.
    "decoupled_diloco": Mode(
        lambda c: ls.AsyncStrategy(c, outer_optimizer=ls.Nesterov(), warmup_steps=3, **_IN_STEP),
        ["none"],
        kept={"shard", "moments"},
    ),
}
ASYNCHRONOUS = ["async", "asynchronous", "ssp", "async_diloco", "decoupled_diloco"]
FULL = [*itertools.product((1, 2), ("SGD", "AdamW"))]
BRIEF = [(1, "AdamW"), (2, "SGD")]


def matrix(
    rank: int, world_size: int, folder: Path, modes: Sequence[str], options: Sequence[tuple[int, str]]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for mode in modes:
        for compressor, (accumulate, optimizer) in itertools.product(MODES[mode].compressors, options):
            name = f"{mode}, {compressor}, accumulate {accumulate}, {optimizer}"
            found[name] = goes_on(world_size, folder / name, MODES[mode], compressor, accumulate, optimizer)
    return found


def goes_on(world_size: int, place: Path, line: Mode, compressor: str, accumulate: int, optimizer: str) -> list[str]:
    options: dict[str, Any] = {
        "model": {"adam": optimizer == "AdamW", "lr": 1e-2, "depth": 2},
        "accumulate_grad_batches": accumulate,
        "epochs": 2,
    }
    chosen = {**COMPRESSORS, **FEW_BITS}[compressor]
    whole = run(line.make(chosen), world_size, folder=place, **options)
    again = run(line.make(chosen), world_size, resume=place / "epoch=0.ckpt", seed=99, **options)
    found = differences(whole, again)
    for kind in sorted(_KEPT[compressor] | line.kept):
        if not any(float(t.abs().sum()) for t in whole.state.get(kind, {}).values()):
            found.append(f"{kind} is empty: nothing is tested")
    if len(again.losses) * 2 != len(whole.losses):
        found.append(f"{len(again.losses)} steps after {len(whole.losses)}")
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 4])
def test_strict_goes_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    modes = ["strict", "unwrapped", "anchored"]
    for found in run_ranks(matrix, world_size, tmp_path, modes, FULL, init="env", deadline=170):
        assert found == {name: [] for name in found}
        assert len(found) == 28


@pytest.mark.dist
def test_every_mode_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """A part of the matrix; `tests/slow` has all of it."""
    modes = [name for name in MODES if name not in ASYNCHRONOUS]
    for found in run_ranks(matrix, 3, tmp_path, modes, BRIEF, init="env", deadline=175):
        assert found == {name: [] for name in found}
        assert len(found) == sum(len(MODES[name].compressors) for name in modes) * 2


@pytest.mark.dist
def test_asynchronous_modes_whose_ranks_go_in_step_go_on_bit_for_bit(tmp_path: Path) -> None:
    for found in run_ranks(matrix, 3, tmp_path, ASYNCHRONOUS, BRIEF, init="env", deadline=175):
        assert found == {name: [] for name in found}
        assert len(found) == len(ASYNCHRONOUS) * 2


def few_bits(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    return {
        f"{mode}, {name}": goes_on(world_size, folder / mode / name, MODES[mode], name, 1, "AdamW")
        for mode in ("strict", "diloco")
        for name in FEW_BITS
    }


@pytest.mark.dist
def test_compressors_of_few_bits_go_on_bit_for_bit(tmp_path: Path) -> None:
    """In two modes: nothing in a mode depends on how blocks are encoded."""
    for found in run_ranks(few_bits, 3, tmp_path, init="env", deadline=170):
        assert found == {name: [] for name in found}
        assert len(found) == 8


def test_every_registered_mode_has_a_line() -> None:
    assert set(NAMES) <= set(MODES)
