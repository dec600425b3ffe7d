"""Quiet points at a number of exchanges: replicas that trained apart hold the same bits there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import lightning_sync as ls
from tests.models import Noise, Toy, everything, fit
from tests.strategies.by_hand import Sharded
from tests.workers import run_ranks


class Look(Callback):
    """Keeps what the rank holds after every step; makes rank 1's steps last longer."""

    def __init__(self) -> None:
        self.held: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.held.append(everything(pl_module))
        time.sleep(0.02 * trainer.global_rank)


def looked_at(rank: int, world: int, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    look, module = Look(), Sharded(rank, world, alternate=True, lr=0.02)
    fit(
        module, ls.AsyncStrategy(**options), world, max_steps=17, use_distributed_sampler=False, callbacks=[look],
        limit_val_batches=1, val_check_interval=5, check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    return look.held


@pytest.mark.dist
@pytest.mark.parametrize(
    ("options", "met"),
    [
        ({"sync_every": 2, "align_every": 2}, {4, 8, 12, 16}),
        ({"sync_every": 3, "align_every": 1, "warmup_steps": 2, "compressor": "int8"}, {1, 2, 5, 8, 11, 14, 17}),
        ({"push": "gradient", "align_every": 4, "max_staleness": 1}, {4, 8, 12, 16}),
    ],
)
def test_all_ranks_hold_the_same_bits_after_every_k_exchanges_and_not_in_between(
    options: dict[str, Any], met: set[int]
) -> None:
    first, second = run_ranks(looked_at, 2, options, init="env", deadline=90)
    pairs = enumerate(zip(first, second, strict=True), start=1)
    equal = {step for step, (a, b) in pairs if all(torch.equal(a[n], b[n]) for n in a)}
    assert met <= equal
    assert len(equal) < 17, "they never were apart: nothing is tested"


class Uneven(Toy):
    def train_dataloader(self) -> Any:
        share = range(0, 40) if self.trainer.global_rank == 0 else range(40, 56)
        return DataLoader(Subset(Noise(), list(share)), batch_size=4)


def uneven(rank: int, world: int) -> tuple[int, int, dict[str, Tensor]]:
    torch.manual_seed(3)
    module, strategy = Uneven(), ls.AsyncStrategy(sync_every=2, align_every=3)
    fit(module, strategy, world, max_steps=-1, max_epochs=2, use_distributed_sampler=False)
    return len(module.losses), strategy.counters.steps, everything(module)


@pytest.mark.dist
def test_ranks_that_run_out_of_data_come_to_all_quiet_points() -> None:
    first, second = run_ranks(uneven, 2, init="env")
    assert (first[0], second[0]) == (20, 8)
    assert first[1] == second[1] == 20
    assert [n for n in first[2] if not torch.equal(first[2][n], second[2][n])] == []
