"""The folder of state comes and goes with its checkpoint; plain DDP and this package read each other's checkpoints."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

import lightning_sync as ls
from lightning_sync.checkpoint import SyncFolder
from tests.checkpoint.runs import Seen, differences, run
from tests.workers import run_ranks


def int8() -> ls.StrictStrategy:
    return ls.StrictStrategy("int8", bucket_cap_mb=0.005)


class Rising(Callback):
    """Logs a metric that names the order in which epochs are good."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("score", self.values[trainer.current_epoch], sync_dist=True)


class SaveTo(Callback):
    """Saves to one path again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def names(folder: Path) -> list[str]:
    return sorted(p.name + (" ->" if p.is_symlink() else "") for p in folder.iterdir())


def keep(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def train(name: str, saver: ModelCheckpoint | SaveTo, *, epochs: int = 3, **options: Any) -> Seen:
        callbacks = [Rising([1.0, 3.0, 2.0, 0.0]), saver]
        # Without a ModelCheckpoint of ours Lightning adds its own, which writes to the current directory.
        checkpointing = isinstance(saver, ModelCheckpoint)
        seen = run(int8(), world_size, epochs=epochs, extra=callbacks, enable_checkpointing=checkpointing, **options)
        dist.barrier()
        found[name] = names(folder / name) if (folder / name).is_dir() else []
        return seen

    def best(name: str, **options: Any) -> ModelCheckpoint:
        return ModelCheckpoint(folder / name, filename="{epoch}", monitor="score", mode="max", **options)

    train("two best", best("two best", save_top_k=2))
    train("best and last", best("best and last", save_top_k=1, save_last=True))
    train("best and link", best("best and link", save_top_k=1, save_last="link"))
    train("weights only", best("weights only", save_weights_only=True))
    train("newest", ModelCheckpoint(folder / "newest", filename="{epoch}"))
    train("over and over", SaveTo(folder / "over and over" / "a.ckpt"))
    found["saves over and over"] = len(SyncFolder(folder / "over and over" / "a.ckpt").saves())
    train("asynchronous", ModelCheckpoint(folder / "asynchronous", filename="{epoch}"), plugins=[AsyncCheckpointIO()])
    whole = train("linked", ModelCheckpoint(folder / "linked", filename="{epoch}", save_last="link"), epochs=2)
    found["state"] = {k: len(v) for k, v in whole.state.items() if k != "generators"}
    for name in ("linked/last.ckpt", "asynchronous/epoch=2.ckpt", "over and over/a.ckpt"):
        again = run(int8(), world_size, epochs=4, resume=folder / name)
        found[f"said of {name}"] = [line for line in again.said if "bit for bit" in line]
    return found


@pytest.mark.dist
def test_the_folder_comes_and_goes_with_its_checkpoint(tmp_path: Path) -> None:
    found = run_ranks(keep, 2, tmp_path, init="env", deadline=120)[0]
    assert found["two best"] == ["epoch=1.ckpt", "epoch=1.ckpt.sync", "epoch=2.ckpt", "epoch=2.ckpt.sync"]
    assert found["best and last"] == ["epoch=1.ckpt", "epoch=1.ckpt.sync", "last.ckpt", "last.ckpt.sync"]
    assert found["best and link"] == ["epoch=1.ckpt", "epoch=1.ckpt.sync", "last.ckpt ->"]
    assert found["weights only"] == ["epoch=1.ckpt"]
    assert found["newest"] == ["epoch=2.ckpt", "epoch=2.ckpt.sync"]
    assert found["asynchronous"] == ["epoch=2.ckpt", "epoch=2.ckpt.sync"]
    assert found["over and over"] == ["a.ckpt", "a.ckpt.sync"]
    assert found["saves over and over"] == 1
    assert found["state"] == {"residual": 4, "owner_residual": 4}
    for name in ("linked/last.ckpt", "asynchronous/epoch=2.ckpt", "over and over/a.ckpt"):
        assert len(found[f"said of {name}"]) == 1, name


def plain(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, first, second in (
        ("theirs to ours", DDPStrategy, ls.StrictStrategy),
        ("ours to theirs", ls.StrictStrategy, DDPStrategy),
    ):
        # Without dropout: plain DDP does not keep the random generators.
        whole = run(DDPStrategy(), world_size, epochs=2, noise=False)
        run(first(), world_size, epochs=1, noise=False, folder=folder / name)
        again = run(second(), world_size, epochs=2, noise=False, resume=folder / name / "epoch=0.ckpt", seed=9)
        different = [d for d in differences(whole, again) if not d.startswith(("counters", "generators"))]
        found[name] = different, again.said
    stock = run(DDPStrategy(), world_size, epochs=1, folder=folder / "stock")
    found["keys"] = [
        sorted(torch.load(folder / name / "epoch=0.ckpt", weights_only=False)) for name in ("stock", "ours to theirs")
    ]
    after = run(int8(), world_size, epochs=2, resume=folder / "stock" / "epoch=0.ckpt")
    found["afresh"] = after.said
    found["losses"] = stock.losses, after.losses
    return found


@pytest.mark.dist
def test_plain_ddp_and_this_package_read_each_other(tmp_path: Path) -> None:
    found = run_ranks(plain, 2, tmp_path, init="env", deadline=120)[0]
    for name in ("theirs to ours", "ours to theirs"):
        assert found[name][0] == [], name
    assert any("start afresh" in line for line in found["theirs to ours"][1])
    theirs, ours = found["keys"]
    assert set(ours) - set(theirs) == {"lightning_sync"}
    assert set(theirs) <= set(ours)
    assert any("start afresh" in line for line in found["afresh"])


def test_a_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    os.symlink(tmp_path / "precious", tmp_path / "a.ckpt.sync")
    SyncFolder(tmp_path / "a.ckpt").remove()
    assert (tmp_path / "precious").is_dir()
