"""Asynchronous training through Lightning: equal to strict where it must be, and ended well where it cannot go on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

import lightning_sync as ls
from lightning_sync import compressors
from lightning_sync.aggregators import Mean
from lightning_sync.validity import check_combination
from tests.models import Toy, everything, fit
from tests.strategies.by_hand import Sharded
from tests.workers import launch_ranks, run_ranks

IN_STEP: dict[str, Any] = {"max_staleness": 0, "blocking": True}


def trained(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def one(rank: int, world: int, strategy: Any, steps: int = 15, momentum: float = 0.9, **trainer: Any) -> Sharded:
    torch.manual_seed(3)
    module = Sharded(rank, world, alternate=True, lr=0.02)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.02, momentum=momentum)  # type: ignore[method-assign]
    fit(module, strategy, world, max_steps=steps, use_distributed_sampler=False, **trainer)
    return module


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def against_strict(rank: int, world: int) -> dict[str, float]:
    found = {}
    for momentum in (0.0, 0.9):
        strict = trained(one(rank, world, ls.StrictStrategy(find_unused_parameters=True), momentum=momentum))
        for name in ("async", "ssp"):
            ours = one(rank, world, ls.strategy(name, **IN_STEP), momentum=momentum)
            found[f"{name}, momentum {momentum}"] = distance(strict, trained(ours))
    return found


@pytest.mark.dist
def test_bound_0_with_blocking_pulls_is_strict_for_sgd_and_momentum() -> None:
    for found in run_ranks(against_strict, 3, init="env", deadline=120):
        assert max(found.values()) < 1e-5, found


def alone(rank: int, world: int) -> float:
    plain = trained(one(rank, world, ls.UnwrappedStrategy(replica="rank")))
    return distance(plain, trained(one(rank, world, ls.strategy("async", sync_every=3))))


@pytest.mark.dist
def test_one_replica_is_a_run_on_one_device() -> None:
    (found,) = run_ranks(alone, 1, init="env")
    assert found < 1e-5


class Watch(Callback):
    """Keeps what is validated and what is saved."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Tensor]] = []

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.shown.append(everything(pl_module))


def validated(rank: int, world: int, options: dict[str, Any], precision: str) -> dict[str, Any]:
    watch, strategy = Watch(), ls.strategy("ssp", **options)
    module = one(
        rank, world, strategy, 12, limit_val_batches=1, val_check_interval=5, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, callbacks=[watch], precision=precision,
    )  # fmt: skip
    counters = strategy.counters
    return {
        "shown": watch.shown,
        "end": everything(module),
        "losses": module.losses,
        "bytes": counters.wire_bytes,
        "exchanges": counters.exchanges,
        "steps": counters.steps,
        "report": dict(strategy.report),
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, "32-true"),
        ({"compressor": "int8", "sync_every": 2}, "32-true"),
        ({"compressor": "bf16", "max_staleness": None}, "bf16-mixed"),
        ({"rule": "inverse_staleness"}, "bf16-true"),
    ],
)
def test_quiet_points_show_all_ranks_the_same_model_and_training_goes_on(
    options: dict[str, Any], precision: str
) -> None:
    first, second = run_ranks(validated, 2, options, precision, init="env", deadline=90)
    assert len(first["shown"]) == 2
    for a, b in zip([*first["shown"], first["end"]], [*second["shown"], second["end"]], strict=True):
        assert [n for n in a if not torch.equal(a[n], b[n])] == [], "ranks see different models"
    for found in (first, second):
        assert found["losses"][-1] < found["losses"][0]
        assert found["steps"] == 12
        assert 1 <= found["exchanges"] <= 14
        assert found["bytes"] > 0
        assert found["report"]["achieved_period"] >= 12 / 14
        assert found["report"]["rejected"] == 0


class Dies(Callback):
    """Kills rank 1 at a step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4 and trainer.global_rank == 1:
            print(f"killed at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, world: int, name: str) -> None:
    one(rank, world, ls.strategy(name), 10_000, callbacks=[Dies()])


@pytest.mark.dist
@pytest.mark.parametrize("name", ["async", "ssp"])
def test_a_killed_worker_ends_the_run_on_all_ranks_and_is_named(name: str) -> None:
    outcomes = launch_ranks(killed, 3, name, init="env", deadline=60)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].exit_code not in (0, None)
        assert "rank 1" in outcomes[rank].stderr
        assert outcomes[rank].seconds - outcomes[1].seconds < 10


def refused(rank: int, world: int) -> dict[str, str]:
    said = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "sync_batchnorm": ("async", {"sync_batchnorm": True}),
    }
    for case, (name, options) in cases.items():
        try:
            fit(Toy(), ls.strategy(name), world, max_steps=2, **options)
        except ValueError as error:
            said[case] = str(error)
    return said


@pytest.mark.dist
def test_what_makes_ranks_wait_in_a_step_is_refused_at_setup() -> None:
    for said in run_ranks(refused, 2, init="env"):
        assert "ranks are not to wait for each other in a step" in said["sync_batchnorm"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sync_every": 0}, r"sync_every=0\): expected an integer of at least 1"),
        ({"max_staleness": -1}, r"max_staleness=-1"),
        ({"push": "all"}, r"push='all'"),
        ({"weight": 0}, r"weight=0\): expected a number above 0"),
        ({"blocking": 1}, r"blocking=1\): expected True or False"),
        ({"rule": "mean"}, r"rule='mean': expected one of add, inverse_staleness"),
        ({"rule": "quorum", "weight": 1.0}, r"Quorum has weights of its own"),
        ({"rule": "quorum", "max_staleness": 1}, r"a quorum holds contributions back"),
        ({"replica": "node"}, r"each rank is a replica of its own"),
        ({"syncevery": 2}, r"unknown argument syncevery.*Did you mean sync_every"),
    ],
)
def test_wrong_values_are_refused_at_construction(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        ls.AsyncStrategy(**options)


@pytest.mark.parametrize("compressor", ["powersgd", "random_block", "qsgd", "dgc", "sign_vote"])
def test_compressors_that_need_all_ranks_at_once_are_refused(compressor: str) -> None:
    with pytest.raises(ValueError, match=r"it needs all ranks at once"):
        check_combination("asynchronous", compressors.registry.build(compressor), Mean(), "32-true")


def test_aggregators_are_refused_because_contributions_come_one_by_one() -> None:
    with pytest.raises(ValueError, match=r"contributions come one by one"):
        check_combination("asynchronous", ls.BF16(), ls.Median(), "32-true")
