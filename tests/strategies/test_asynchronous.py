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
from torch.utils.data import DataLoader, Subset

import lightning_sync as ls
from lightning_sync import compressors
from lightning_sync.aggregators import Mean
from lightning_sync.asynchronous.rules import Elastic
from lightning_sync.validity import check_combination
from tests.models import Noise, Toy, everything, fit
from tests.strategies.by_hand import Sharded
from tests.workers import launch_ranks, run_ranks

IN_STEP: dict[str, Any] = {"max_staleness": 0, "blocking": True}


def trained(module: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def one(rank: int, world: int, strategy: Any, steps: int = 12, momentum: float = 0.9, **trainer: Any) -> Sharded:
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
        ours = one(rank, world, ls.strategy("ssp", **IN_STEP), momentum=momentum)
        found[f"momentum {momentum}"] = distance(strict, trained(ours))
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


class Scheduled(Sharded):
    """AdamW in two groups, with a schedule; all parameters are used in every step."""

    def configure_optimizers(self) -> Any:
        bare = [p for p in self.parameters() if p.ndim < 2]
        rest = [p for p in self.parameters() if p.ndim > 1]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0, "lr": 0.003}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def gradients(rank: int, world: int) -> dict[str, float]:
    found = {}
    options: dict[str, Any] = {"push": "gradient", "blocking": True}
    if world == 1:
        ends = []
        for strategy in (ls.UnwrappedStrategy(replica="rank"), ls.AsyncStrategy(**options)):
            torch.manual_seed(3)
            module = Scheduled(rank, world)
            fit(module, strategy, world, max_steps=14, use_distributed_sampler=False, gradient_clip_val=0.1)
            ends.append(trained(module))
        found["AdamW in groups, with a schedule and clipping"] = distance(*ends)
        return found
    strict = trained(one(rank, world, ls.StrictStrategy(find_unused_parameters=True), momentum=0.0))
    ours = ls.strategy("ssp", max_staleness=0, weight=1 / world, **options)
    found["SGD"] = distance(strict, trained(one(rank, world, ours, momentum=0.0)))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_applied_by_owners_are_steps_of_the_modules_own_optimiser(world: int) -> None:
    for found in run_ranks(gradients, world, init="env", deadline=90):
        assert max(found.values()) < 1e-5, found


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
        ({"push": "gradient"}, "32-true"),
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


class Two(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.SGD(self.last.parameters(), 0.1)]


class Line(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Slow(Callback):
    """Makes one rank's steps take their time."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 1 and trainer.global_rank == self.rank:
            time.sleep(self.seconds)


def slow(rank: int, world: int, seconds: float, steps: int) -> int:
    strategy = ls.strategy("ssp", step_timeout=3.0, max_staleness=1)
    one(rank, world, strategy, steps, callbacks=[Slow(1, seconds)])
    return strategy.counters.steps


@pytest.mark.dist
def test_a_slow_rank_is_waited_for_at_the_end_longer_than_a_step_may_take() -> None:
    assert run_ranks(slow, 2, 0.8, 10, init="env") == [10, 10]


@pytest.mark.dist
def test_a_rank_that_hangs_ends_the_run_on_all_ranks_and_is_named() -> None:
    outcomes = launch_ranks(slow, 2, 40.0, 10, init="env", deadline=60)
    for outcome in outcomes:
        assert outcome.exit_code not in (0, None)
        assert "rank 1" in outcome.stderr
        assert "step_timeout" in outcome.stderr
    assert outcomes[0].seconds < 35


class Uneven(Toy):
    def train_dataloader(self) -> Any:
        share = range(0, 40) if self.trainer.global_rank == 0 else range(40, 56)
        return DataLoader(Subset(Noise(), list(share)), batch_size=4)


def uneven(rank: int, world: int, name: str) -> tuple[int, int, dict[str, Tensor]]:
    torch.manual_seed(3)
    module, strategy = Uneven(), ls.strategy(name)
    fit(module, strategy, world, max_steps=-1, max_epochs=2, use_distributed_sampler=False)
    return len(module.losses), strategy.counters.steps, everything(module)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["async", "ssp"])
def test_ranks_with_different_amounts_of_data_use_all_of_it_and_end_equal(name: str) -> None:
    first, second = run_ranks(uneven, 2, name, init="env")
    assert (first[0], second[0]) == (20, 8)
    assert first[1] == second[1] == 20
    assert [n for n in first[2] if not torch.equal(first[2][n], second[2][n])] == []


def refused(rank: int, world: int) -> dict[str, str]:
    said = {}
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "sync_batchnorm": (Toy, {}, {"sync_batchnorm": True}),
        "two optimisers": (Two, {"push": "gradient"}, {}),
        "line search": (Line, {"push": "gradient"}, {}),
    }
    for case, (module, options, trainer) in cases.items():
        try:
            fit(module(), ls.AsyncStrategy(**options), world, max_steps=2, **trainer)
        except ValueError as error:
            said[case] = str(error)
    return said


@pytest.mark.dist
def test_what_makes_ranks_wait_in_a_step_is_refused_at_setup() -> None:
    for said in run_ranks(refused, 2, init="env"):
        assert "ranks are not to wait for each other in a step" in said["sync_batchnorm"]
        assert "needs one optimiser" in said["two optimisers"]
        assert "LBFGS cannot run on a shard" in said["line search"]


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
        ({"rule": "quorum", "max_staleness": 1}, r"Quorum holds contributions back"),
        ({"push": "gradient", "sync_every": 2}, r"push='gradient', sync_every=2.*every gradient is sent"),
        ({"local_updates": "fast"}, r"local_updates='fast'"),
        ({"local_updates": "dynamic"}, r"sync_every=1\): periods are cut down from sync_every"),
        ({"local_updates": "dynamic", "sync_every": 8, "align_every": 2}, r"different numbers of exchanges"),
        ({"align_every": 0}, r"align_every=0\): expected an integer of at least 1"),
        ({"align_every": 2, "rule": Elastic(0.1)}, r"align_every=2, rule=Elastic.*they would only wait"),
        ({"warmup_steps": -1}, r"warmup_steps=-1\): expected an integer of at least 0"),
        ({"push": "gradient", "warmup_steps": 5}, r"warmup_steps=5.*without the moments of the warm-up"),
        ({"push": "gradient", "rule": "delayed_nesterov"}, r"is for push=delta, not 'gradient'"),
        ({"outer_optimizer": 3}, r"outer_optimizer=3"),
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
