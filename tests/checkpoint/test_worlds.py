"""2 -> 4 -> 3 ranks, and other compressors: nothing owed is lost, and the log says what starts afresh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sync as ls
from lightning_sync.checkpoint import SyncFolder
from lightning_sync.checkpoint.respread import owed
from tests.checkpoint.runs import run
from tests.workers import run_ranks

COMPRESSORS: dict[str, Any] = {"int8": "int8", "powersgd": ls.PowerSGD(rank=2, warmup_steps=1)}


def total_in(checkpoint: Path) -> dict[str, Tensor]:
    """What a checkpoint says is owed, over all ranks."""
    folder = SyncFolder(checkpoint)
    manifest = folder.manifest(folder.saves()[-1])
    sizes = {name: p.numel for name, p in manifest.parameters.items()}
    return owed((folder.read(manifest, r) for r in range(manifest.world_size)), sizes)


def stage(rank: int, world_size: int, folder: Path, number: int, resume: str) -> dict[str, Any]:
    """One epoch more, and what each rank begins it with."""
    results: dict[str, Any] = {}
    for name, compressor in COMPRESSORS.items():
        strategy = ls.StrictStrategy(compressor, bucket_cap_mb=0.005)
        begun: dict[str, Any] = {}
        results[name] = begun
        seen = run(
            strategy,
            world_size,
            epochs=number,
            folder=folder / name / f"{world_size} ranks",
            resume=folder / name / resume if resume else None,
            at_start=lambda s, begun=begun: begun.update(
                state=s._reducer.state_dict(), covers=s._reducer.covers(), step=s.counters.steps
            ),
        )
        begun.update(said=seen.said, losses=seen.losses)
    return results


def total_begun(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for begun in ranks:
        for kind, covers in begun["covers"].items():
            for key, cover in covers.items():
                places, real = cover.elements()
                flat = total.setdefault(cover.name, torch.zeros(cover.numel, dtype=torch.float64))
                flat.index_add_(0, places[real], begun["state"][kind][key].double()[real])
    return total


@pytest.mark.dist
def test_two_then_four_then_three_ranks(tmp_path: Path) -> None:
    run_ranks(stage, 2, tmp_path, 1, "", init="env")
    checkpoint, steps = "2 ranks/epoch=0.ckpt", 4
    for world_size, number in ((4, 2), (3, 3)):
        ranks = run_ranks(stage, world_size, tmp_path, number, checkpoint, init="env", deadline=90)
        for name in COMPRESSORS:
            begun = [r[name] for r in ranks]
            expected, now = total_in(tmp_path / name / checkpoint), total_begun(begun)
            assert expected.keys() == now.keys() != set()
            for key, value in expected.items():
                assert float(value.norm()) > 0
                assert float((now[key] - value).norm()) <= 1e-6 * float(value.norm()), (name, world_size, key)
            assert [b["step"] for b in begun] == [steps] * world_size
            assert all(torch.isfinite(torch.tensor(b["losses"])).all() for b in begun)
            assert any("spread evenly" in line and "ranks" in line for line in begun[0]["said"])
            if name == "powersgd":
                factors = [b["state"]["factor"] for b in begun]
                assert all(torch.equal(factors[0][k], f[k]) for f in factors for k in f)
        checkpoint, steps = f"{world_size} ranks/epoch={number - 1}.ckpt", steps + 4


def switch(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    run(ls.StrictStrategy("int8"), world_size, epochs=1, folder=folder / "int8")
    run(ls.UnwrappedStrategy(replica="rank"), world_size, epochs=1, folder=folder / "unwrapped")
    for name, source, strategy in (
        ("int8 to powersgd", "int8", ls.StrictStrategy(ls.PowerSGD(warmup_steps=0))),
        ("int8 to none", "int8", ls.StrictStrategy()),
        ("unwrapped to strict", "unwrapped", ls.StrictStrategy("int8")),
        ("strict to unwrapped", "int8", ls.UnwrappedStrategy(replica="rank")),
    ):
        seen = run(strategy, world_size, epochs=2, resume=folder / source / "epoch=0.ckpt")
        said[name] = [line for line in seen.said if "another layout" in line]
        assert seen.steps == 8
    return said


@pytest.mark.dist
def test_another_compressor_or_mode_says_what_starts_afresh(tmp_path: Path) -> None:
    said = run_ranks(switch, 2, tmp_path, init="env", deadline=90)[0]
    assert all(len(lines) == 1 for lines in said.values()), said
    assert "compressor 'int8' -> 'powersgd'" in said["int8 to powersgd"][0]
    assert "nothing is compressed now" in said["int8 to none"][0]
    assert "every replica but rank 0's" in said["unwrapped to strict"][0]
    assert "mode 'strict' -> 'unwrapped'" in said["strict to unwrapped"][0]
