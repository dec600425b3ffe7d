"""What a resumed, changed or interrupted hybrid run must not lose or mix up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lightning_sync as ls
from tests.models import Toy, fit
from tests.strategies.by_hand import Sharded
from tests.workers import run_ranks


def run(rank: int, world: int, strategy: Any, epochs: int, module: Toy | None = None, **options: Any) -> Toy:
    torch.manual_seed(5)
    module = module or Sharded(rank, world)
    fit(module, strategy, world, -1, max_epochs=epochs, use_distributed_sampler=False, **options)
    return module


def resumed(rank: int, world: int, folder: Path) -> dict[str, list[str]]:
    """Checkpoints made while a validation shows the consensus hold each replica's own state."""
    found = {}
    for name, options in {"local_sgd": {"sync_every": 8}, "delayed": {}}.items():
        saver = ModelCheckpoint(
            folder / name, filename="{epoch}", monitor="val_loss", save_top_k=-1, save_on_train_epoch_end=False
        )
        whole = run(rank, world, ls.strategy(name, **options), 2, limit_val_batches=1, callbacks=[saver],
                    enable_checkpointing=True)  # fmt: skip
        again = run(rank, world, ls.strategy(name, **options), 2, limit_val_batches=1,
                    ckpt_path=folder / name / "epoch=0.ckpt")  # fmt: skip
        a, b = whole.state_dict(), again.state_dict()
        found[name] = [k for k in a if not torch.equal(a[k], b[k])]
        if whole.losses[-len(again.losses) :] != again.losses:
            found[name].append("losses")
    return found


@pytest.mark.dist
def test_a_checkpoint_made_in_validation_resumes_bit_for_bit(tmp_path: Path) -> None:
    for found in run_ranks(resumed, 2, tmp_path, init="env", deadline=150):
        assert found == {"local_sgd": [], "delayed": []}


def changed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Go on from one checkpoint with other options; says how many exchanges there were, and the spread of replicas."""
    found: dict[str, Any] = {}
    first = folder / "first.ckpt"

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 11:
                trainer.save_checkpoint(first)

    streaming = {"sync_every": 8, "fragments": 2, "overlap_steps": 2, "warmup_steps": 0}
    run(rank, world, ls.strategy("streaming_diloco", **streaming), 1, callbacks=[Save()], enable_checkpointing=False)
    for case, strategy in {
        "slowmo": ls.strategy("slowmo", sync_every=4),
        "local_sgd": ls.strategy("local_sgd", sync_every=4),
        "growing": ls.HybridStrategy(sync_every=ls.Growing(start=2, every=2, limit=4)),
        "seconds": ls.HybridStrategy(sync_every_seconds=0.01),
        "warming up": ls.strategy("diloco", warmup_steps=300),
    }.items():
        module = run(rank, world, strategy, 2, ckpt_path=first)
        found[case] = (strategy.counters.exchanges, float(sum(p.double().sum() for p in module.parameters())))
    return found


@pytest.mark.dist
def test_other_options_take_over_what_they_can_and_go_on_meeting(tmp_path: Path) -> None:
    first, second = run_ranks(changed, 2, tmp_path, init="env", deadline=170)
    assert first == second
    assert first["local_sgd"][0] >= 3
    assert first["growing"][0] >= 3


class Reassigns(Sharded):
    """Gives a buffer a new tensor in every step, and skips the rest of its second epoch."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.register_buffer("average", torch.zeros(1))
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.average = self.average * 0.5 + 1 + self.rank
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        self.gathered = self.all_gather(torch.tensor(float(self.rank)))


def reassigned(rank: int, world: int) -> tuple[float, list[float]]:
    module = Reassigns(rank, world)
    run(rank, world, ls.strategy("local_sgd", sync_every=4), 2, module)
    return float(module.average), module.gathered.tolist()


@pytest.mark.dist
def test_reassigned_buffers_are_merged_and_skipped_epochs_are_over() -> None:
    (a, gathered), (b, _) = run_ranks(reassigned, 2, init="env", deadline=100)
    assert a == b
    assert 2.5 < a < 3.5, "the mean of about 2 and about 4"
    assert gathered == [0.0, 1.0]


class Unfreezes(Sharded):
    def on_train_epoch_start(self) -> None:
        self.sometimes.requires_grad_(self.current_epoch == 1)


class PerRankRate(Sharded):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01 * (1 + self.trainer.global_rank))


class UsesLess(Sharded):
    """The second rank never uses one layer."""

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers[: None if self.trainer.global_rank == 0 else -1]:
            x = torch.relu(layer(x)) + x
        return self.last(x)


def refusals(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    module = run(rank, world, ls.strategy("slowmo", sync_every=4), 1, PerRankRate(rank, world))
    found["rates"] = float(sum(p.detach().double().sum() for p in module.parameters()))
    try:
        run(rank, world, ls.strategy("local_sgd", sync_every=4), 2, Unfreezes(rank, world))
    except RuntimeError as error:
        found["unfrozen"] = str(error)
    try:
        strategy = ls.strategy("local_sgd", sync_every=4, inner_state="average")
        run(rank, world, strategy, 1, UsesLess(rank, world, adam=True))
    except Exception as error:
        found["average"] = str(error)
    assert isinstance(module.norm, nn.Module)
    return found


@pytest.mark.dist
def test_what_ranks_do_differently_is_agreed_or_refused() -> None:
    first, second = run_ranks(refusals, 2, init="env", deadline=120)
    assert first["rates"] == second["rates"], "SlowMo uses the mean of the ranks' learning rates"
    for found in (first, second):
        assert "'sometimes.weight' was unfrozen during fit" in found["unfrozen"]
        assert "ranks have used different parameters" in found["average"]
