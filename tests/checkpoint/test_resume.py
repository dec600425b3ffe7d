"""A run that is resumed at an epoch end is the run that was never interrupted, bit for bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_sync as ls
from tests.checkpoint.runs import differences, run
from tests.workers import run_ranks

COMPRESSORS: dict[str, Any] = {
    "none": None,
    "int8": "int8",
    "powersgd": ls.PowerSGD(rank=2, warmup_steps=1),
}
KEPT = {"none": set(), "int8": {"residual", "owner_residual"}, "powersgd": {"residual", "factor"}}
CASES = [*itertools.product(COMPRESSORS, (1, 2), ("SGD", "AdamW"))]


def strict(compressor: str) -> ls.StrictStrategy:
    return ls.StrictStrategy(COMPRESSORS[compressor], bucket_cap_mb=0.005)


def matrix(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for compressor, accumulate, optimizer in CASES:
        name = f"{compressor}, accumulate {accumulate}, {optimizer}"
        options: dict[str, Any] = {
            "model": {"adam": optimizer == "AdamW", "lr": 1e-2, "depth": 2},
            "accumulate_grad_batches": accumulate,
        }
        place = folder / name
        whole = run(strict(compressor), world_size, epochs=2, folder=place, **options)
        again = run(strict(compressor), world_size, epochs=2, resume=place / "epoch=0.ckpt", seed=99, **options)
        found[name] = differences(whole, again)
        empty = [k for k in KEPT[compressor] if not any(float(t.abs().sum()) for t in whole.state.get(k, {}).values())]
        found[name] += [f"{kind} is empty: nothing is tested" for kind in empty]
        if len(again.losses) * 2 != len(whole.losses):
            found[name].append(f"{len(again.losses)} steps after {len(whole.losses)}")
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_strict_goes_on_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    for found in run_ranks(matrix, world_size, tmp_path, init="env", deadline=170):
        assert found == {name: [] for name in found}
        assert len(found) == len(CASES)
