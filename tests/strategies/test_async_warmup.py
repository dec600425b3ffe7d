"""The asynchronous modes may begin strict: nobody is alone until the warm-up ends, and nothing of it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import lightning_sync as ls
from lightning_sync.asynchronous.rules import Elastic
from tests.models import Noise, Toy, everything, fit
from tests.strategies.by_hand import Sharded
from tests.workers import run_ranks

IN_STEP: dict[str, Any] = {"max_staleness": 0, "blocking": True}


def one(rank: int, world: int, strategy: Any, steps: int, **options: Any) -> Sharded:
    torch.manual_seed(3)
    module = Sharded(rank, world, alternate=True, adam=True, lr=0.01)
    fit(module, strategy, world, max_steps=steps, use_distributed_sampler=False, **options)
    return module


def unequal(a: dict[str, Tensor], b: dict[str, Tensor], bound: float = 0.0) -> list[str]:
    return [n for n in a if float((a[n].double() - b[n].double()).abs().max()) > bound]


def against_hybrid(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    for steps, exchanges in ((4, 0), (5, 0), (13, 2)):
        hybrid = one(rank, world, ls.HybridStrategy(replica="rank", sync_every=4, warmup_steps=5), steps)
        strategy = ls.AsyncStrategy(sync_every=4, warmup_steps=5, **IN_STEP)
        ours = one(rank, world, strategy, steps)
        assert strategy.counters.exchanges == exchanges
        assert strategy.counters.steps == steps
        held = {n: p.detach() for n, p in ours.named_parameters()}
        # Buffers of replicas are merged by both at the end, after as many steps alone.
        found[f"{steps} steps"] = unequal(held, {n: p.detach() for n, p in hybrid.named_parameters()}, 2e-6)
        if not exchanges:
            found[f"{steps} steps, buffers"] = unequal(everything(ours), everything(hybrid))
    return found


@pytest.mark.dist
def test_ranks_that_go_in_step_are_post_local_sgd_before_and_after_the_warm_up_ends() -> None:
    for found in run_ranks(against_hybrid, 3, init="env", deadline=120):
        assert found == {name: [] for name in found}


def freely(rank: int, world: int, name: str) -> tuple[dict[str, Tensor], float]:
    strategy = ls.strategy(name, sync_every=2, warmup_steps=4, compressor="int8")
    module = one(
        rank, world, strategy, 12, limit_val_batches=1, val_check_interval=3, check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )  # fmt: skip
    return everything(module), strategy.report["achieved_period"]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["async_diloco", "decoupled_diloco"])
def test_ranks_validate_while_warming_up_and_after_and_end_equal(name: str) -> None:
    (first, period), (second, _) = run_ranks(freely, 2, name, init="env", deadline=90)
    assert unequal(first, second) == []
    assert 0 < period <= 8, "steps of the warm-up do not count"


class Begin(Callback):
    """Keeps what training begins with."""

    held: dict[str, Tensor]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.held = everything(pl_module)


def resumed(rank: int, world: int, folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Any:
    keep, begin = ModelCheckpoint(folder, filename="kept", every_n_train_steps=5, save_top_k=-1), Begin()
    one(rank, world, ls.AsyncStrategy(sync_every=2, **before), 6, enable_checkpointing=True, callbacks=[keep])
    torch.manual_seed(rank)
    again = Sharded(rank, world, alternate=True, adam=True, lr=0.01)
    fit(
        again, ls.AsyncStrategy(sync_every=2, **after), world, max_steps=10, use_distributed_sampler=False,
        ckpt_path=folder / "kept.ckpt", callbacks=[begin],
    )  # fmt: skip
    saved = torch.load(folder / "kept.ckpt", weights_only=True)["state_dict"]
    return everything(again), begin.held, saved


@pytest.mark.dist
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"warmup_steps": 8}, {"warmup_steps": 2}),
        ({"warmup_steps": 8}, {"warmup_steps": 5}),
        ({"warmup_steps": 0}, {"warmup_steps": 8}),
        ({"warmup_steps": 2, "rule": Elastic(0.2)}, {"warmup_steps": 20, "rule": Elastic(0.2)}),
    ],
)
def test_a_run_goes_on_with_another_warm_up(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    first, second = run_ranks(resumed, 2, tmp_path, before, after, init="env", deadline=90)
    assert unequal(first[0], second[0]) == [], "ranks end apart"
    if "rule" not in before:  # elastic averaging leaves replicas where they are; they begin as the first one
        for _, begun, saved in (first, second):
            assert unequal(begun, saved) == [], "it begins with something else than was saved"


class Uneven(Toy):
    def train_dataloader(self) -> Any:
        share = range(0, 40) if self.trainer.global_rank == 0 else range(40, 56)
        return DataLoader(Subset(Noise(), list(share)), batch_size=4)


def uneven(rank: int, world: int) -> tuple[int, int, dict[str, Tensor]]:
    torch.manual_seed(3)
    module, strategy = Uneven(), ls.AsyncStrategy(sync_every=2, warmup_steps=6, local_updates="dynamic")
    fit(module, strategy, world, max_steps=-1, max_epochs=2, use_distributed_sampler=False)
    return len(module.losses), strategy.counters.steps, everything(module)


@pytest.mark.dist
def test_a_rank_may_run_out_of_data_while_warming_up() -> None:
    first, second = run_ranks(uneven, 2, init="env")
    assert (first[0], second[0]) == (20, 8)
    assert first[1] == second[1] == 20
    assert unequal(first[2], second[2]) == []


def test_long_local_phases_come_after_300_strict_steps_unless_said_otherwise() -> None:
    for name, steps in {"async": 0, "ssp": 0, "async_diloco": 300, "decoupled_diloco": 300}.items():
        assert ls.strategy(name).warmup_steps == steps  # type: ignore[attr-defined]
