"""20 of 20 compressed runs end with the same bits on all ranks. Run it with

    pytest -m slow tests/slow/test_replicas_equal.py

A race between reductions, validation and logging would show here as a difference, a hang or an abort; a single run of a
few steps shows it only now and then, so this one repeats.
"""

import hashlib
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import lightning_sync as ls
from tests.models import Toy, fit
from tests.workers import run_ranks

RUNS, STEPS, WORLD_SIZE, BUCKETS = 20, 200, 4, 10


class Chatty(Toy):
    """Toy, with a collective of the user's own in every training step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss_everywhere", loss, sync_dist=True)
        return loss


class CountBuckets(Callback):
    """Notes into how many buckets DDP has put the gradients, after it has rebuilt them."""

    buckets = 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sizes = trainer.strategy.model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        self.buckets = len(str(sizes).split(","))


def compressor(run: int) -> ls.Compressor:
    return ls.BlockInt8() if run % 2 == 0 else ls.PowerSGD(rank=2, warmup_steps=5)


def digests(module: LightningModule) -> dict[str, str]:
    """One digest per parameter and buffer: equal if and only if the bits are."""
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in module.state_dict().items()
    }


def train(rank: int, world_size: int, runs: int, steps: int) -> list[dict[str, Any]]:
    results = []
    for run in range(runs):
        torch.manual_seed(run)
        module = Chatty(depth=10, lr=1e-3)  # at ten layers the default rate diverges
        start = digests(module)
        strategy = ls.StrictStrategy(compressor=compressor(run), bucket_cap_mb=0.004)
        count = CountBuckets()
        # DDP hands out rank 0's buffers before every forward, and BatchNorm then takes in each rank's own batch. Last
        # come the forwards of a validation, which change nothing: so buffers, too, have to be equal by bits at the end.
        fit(
            module,
            strategy,
            world_size,
            max_steps=steps,
            val_check_interval=20,
            check_val_every_n_epoch=None,
            limit_val_batches=2,
            callbacks=[count],
        )
        end = digests(module)
        moved = sum(start[k] != end[k] for k in end)
        results.append({"end": end, "moved": moved, "buckets": count.buckets, "steps": strategy.counters.steps})
    return results


def check(ranks: list[list[dict[str, Any]]], steps: int) -> None:
    for run, results in enumerate(zip(*ranks, strict=True)):
        first = results[0]
        assert first["steps"] == steps
        assert first["buckets"] >= BUCKETS, first["buckets"]
        assert first["moved"] > 20, "it has trained"
        for rank, other in enumerate(results[1:], start=1):
            unequal = [k for k in first["end"] if first["end"][k] != other["end"][k]]
            assert unequal == [], f"run {run}, {compressor(run)!r}: rank {rank} differs from rank 0"


@pytest.mark.dist
def test_one_short_run_of_each_kind_ends_equal() -> None:
    check(run_ranks(train, WORLD_SIZE, 2, 20, init="env", deadline=120), 20)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(2400)
def test_twenty_runs_end_equal_by_bits() -> None:
    check(run_ranks(train, WORLD_SIZE, RUNS, STEPS, init="env", deadline=2300), STEPS)
