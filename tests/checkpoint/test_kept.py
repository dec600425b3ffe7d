"""Kept beyond the ordinary: loaders' positions, state after fit; and what `save_local="consensus"` leaves out."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_sync as ls
from lightning_sync.checkpoint import SyncFolder
from lightning_sync.checkpoint.describe import describe
from lightning_sync.strategies import resume
from tests.checkpoint.modes import Anchored
from tests.checkpoint.runs import EPOCH, Noisy, differences, run
from tests.models import Noise
from tests.workers import run_ranks


class Stream:
    """Batches in an order of the rank's own, for ever; can say where it is and go on from there."""

    def __init__(self, extra: Any = None) -> None:
        self.data = Noise()
        self.extra = extra
        self.generator = torch.Generator().manual_seed(100 + dist.get_rank())
        self.drawn = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __len__(self) -> int:
        return EPOCH

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.drawn += 1
        picked = torch.randint(len(self.data), (4,), generator=self.generator)
        return self.data.x[picked], self.data.y[picked]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "generator": self.generator.get_state(), "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.generator.set_state(state["generator"])


class Streaming(Noisy):
    extra: Any = None

    def train_dataloader(self) -> Any:
        return Stream(self.extra)


class Foreign(Streaming):
    extra = frozenset({1})


def int8(**options: Any) -> ls.StrictStrategy:
    return ls.StrictStrategy("int8", bucket_cap_mb=0.005, **options)


def mid_epoch(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    def every_two(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=2, save_top_k=-1)

    options: dict[str, Any] = {"epochs": 2, "enable_checkpointing": True}
    whole = run(int8(), world_size, kind=Streaming, extra=[every_two("own")], **options)
    again = run(int8(), world_size, kind=Streaming, resume=folder / "own" / "step=2.ckpt", seed=99, epochs=2)
    foreign = run(int8(), world_size, kind=Foreign, extra=[every_two("foreign")], **options)
    return {"differences": differences(whole, again), "losses": again.losses, "said": foreign.said}


@pytest.mark.dist
def test_in_the_middle_of_an_epoch_each_rank_goes_on_where_its_loader_was(tmp_path: Path) -> None:
    ranks = run_ranks(mid_epoch, 2, tmp_path, init="env", deadline=90)
    assert [r["differences"] for r in ranks] == [[], []]
    assert [len(r["losses"]) for r in ranks] == [6, 6]
    assert ranks[0]["losses"] != ranks[1]["losses"]
    assert "loaders          1 stateful" in describe(tmp_path / "own" / "step=2.ckpt")
    assert any("loaders are not saved" in line and "frozenset" in line for line in ranks[0]["said"])


def after_fit(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in {"int8": int8, "anchored": lambda: Anchored(replica="rank")}.items():
        whole = run(make(), world_size, epochs=2)
        first = run(make(), world_size, epochs=1)
        before = torch.get_rng_state()
        first.trainer.save_checkpoint(folder / f"{name}.ckpt")
        assert torch.equal(before, torch.get_rng_state())
        found[name] = differences(whole, run(make(), world_size, epochs=2, resume=folder / f"{name}.ckpt", seed=9))
    module = Noisy()
    trainer = Trainer(
        strategy=int8(), accelerator="cpu", devices=world_size, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=1,
    )  # fmt: skip
    trainer.validate(module, verbose=False)
    if rank == 0:
        with pytest.warns(UserWarning, match="there was no fit before"):
            trainer.save_checkpoint(folder / "never.ckpt")
    else:
        trainer.save_checkpoint(folder / "never.ckpt")
    return found


@pytest.mark.dist
def test_a_checkpoint_saved_after_fit_holds_the_state_of_its_end(tmp_path: Path) -> None:
    for found in run_ranks(after_fit, 2, tmp_path, init="env", deadline=90):
        assert found == {"int8": [], "anchored": []}
    assert "step        4" in describe(tmp_path / "int8.ckpt")
    assert not (tmp_path / "never.ckpt.sync").exists()


def consensus(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    resume._NOTABLE, resume._TIMES = 1000, 0  # type: ignore[assignment]
    powersgd = ls.PowerSGD(rank=2, warmup_steps=1)
    for name, make in {
        "powersgd": lambda **o: ls.StrictStrategy(powersgd, **o),
        "anchored": lambda **o: Anchored(replica="rank", **o),
    }.items():
        first = run(make(save_local="consensus"), world_size, epochs=1, folder=folder / name)
        begun: dict[str, Any] = {}

        def look(strategy: Any, begun: dict[str, Any] = begun) -> None:
            mode = deepcopy(strategy.mode_state())
            begun.update(state=strategy._reducer.state_dict(), steps=strategy.counters.steps, mode=mode)

        again = run(make(), world_size, epochs=2, resume=folder / name / "epoch=0.ckpt", at_start=look)
        found[name] = {"begun": begun, "first": first, "said": again.said, "said first": first.said}
    return found


@pytest.mark.dist
def test_consensus_keeps_what_all_share_and_says_what_starts_afresh(tmp_path: Path) -> None:
    ranks = run_ranks(consensus, 2, tmp_path, init="env", deadline=90)
    for found in ranks:
        begun, first = found["powersgd"]["begun"], found["powersgd"]["first"]
        assert all(torch.equal(begun["state"]["factor"][n], t) for n, t in first.state["factor"].items())
        assert not any(t.any() for t in begun["state"]["residual"].values())
        mode, first = found["anchored"]["begun"]["mode"], found["anchored"]["first"]
        assert all(torch.equal(mode.replicated["anchor"][n], t) for n, t in first.state["anchor"].items())
        assert not any(t.any() for t in mode.local["velocity"].values())
        assert all(found[name]["begun"]["steps"] == 4 for name in found)
    for name, expected in {"powersgd": "Afresh start: residual;", "anchored": "velocity of mode 'anchored'"}.items():
        (line,) = [x for x in ranks[0][name]["said"] if "Afresh start" in x]
        assert "save_local='consensus'" in line
        assert expected in line
        assert sum("in every save that is kept" in x for x in ranks[0][name]["said first"]) == 1
        checkpoint = tmp_path / name / "epoch=0.ckpt"
        (save,) = SyncFolder(checkpoint).saves()
        assert sorted(p.name for p in (SyncFolder(checkpoint).path / save).iterdir()) == [
            "manifest.json",
            "rank-00000.pt",
        ]
        assert "what differs by rank is left out" in describe(checkpoint)


def test_save_local_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"save_local='some'.*'all' or 'consensus'"):
        ls.StrictStrategy(save_local="some")  # type: ignore[arg-type]
