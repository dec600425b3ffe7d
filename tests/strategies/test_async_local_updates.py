"""Dynamic local updates through Lightning: slow ranks exchange after fewer steps, and nothing else changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

import lightning_sync as ls
from tests.models import everything, fit
from tests.strategies.by_hand import Sharded
from tests.workers import run_ranks


class Slow(Callback):
    """Makes rank 1 four times slower than rank 0."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.08 if trainer.global_rank == 1 else 0.02)


class Late(Callback):
    """Keeps the period of every step."""

    def __init__(self) -> None:
        self.periods: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.periods.append(trainer.strategy.engine.every)


def paced(rank: int, world: int, options: dict[str, Any]) -> tuple[list[int], dict[str, Tensor]]:
    torch.manual_seed(3)
    late, module = Late(), Sharded(rank, world, alternate=True, lr=0.02)
    fit(
        module, ls.AsyncStrategy(sync_every=8, local_updates="dynamic", **options), world, max_steps=60,
        use_distributed_sampler=False, callbacks=[Slow(), late], limit_val_batches=1, val_check_interval=30,
        check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    return late.periods, everything(module)


@pytest.mark.dist
@pytest.mark.parametrize("options", [{}, {"max_staleness": 1, "warmup_steps": 4}])
def test_a_slow_rank_exchanges_after_fewer_steps_and_all_end_equal(options: dict[str, Any]) -> None:
    (fast, held), (slow, other) = run_ranks(paced, 2, options, init="env", deadline=90)
    assert [n for n in held if not torch.equal(held[n], other[n])] == []
    assert fast[-1] == 8, "the fastest keeps the period"
    assert slow[0] == 8, "nothing is known at first"
    assert 1 <= slow[-1] <= 5, "about a quarter of it, on a machine that does other things besides"
