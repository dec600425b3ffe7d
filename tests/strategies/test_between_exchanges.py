"""What holds in hybrid modes while replicas differ: validation, checkpoints, users' collectives, clocks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_sync as ls
from tests.comm.census import census
from tests.models import Noise, Toy, everything, fit
from tests.strategies.by_hand import Sharded
from tests.strategies.test_unwrapped import TwoOptimisers
from tests.workers import run_ranks


class Watch(Callback):
    """Keeps the model as it is after a batch, in validation, and after validation."""

    def __init__(self) -> None:
        self.own: list[dict[str, Tensor]] = []
        self.shown: list[dict[str, Tensor]] = []
        self.back: list[dict[str, Tensor]] = []
        self.saved: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 6:
            self.own.append(everything(pl_module))
            self.saved.append(copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(weights_only=True)))

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 6 and not self.shown:
            self.shown.append(everything(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 6:
            self.back.append(everything(pl_module))


def validated(rank: int, world: int) -> dict[str, Any]:
    results = {}
    for name, options in {
        "local_sgd": {"sync_every": 4},
        "streaming_diloco": {"sync_every": 8, "fragments": 2, "overlap_steps": 3, "warmup_steps": 1},
        "easgd": {"sync_every": 4},
        "delayed": {},
    }.items():
        torch.manual_seed(0)
        watch, module = Watch(), Toy()
        strategy = ls.strategy(name, **options)
        trainer = fit(
            module, strategy, world, 13, limit_val_batches=1, val_check_interval=6, callbacks=[watch],
            check_val_every_n_epoch=None, num_sanity_val_steps=0,
        )  # fmt: skip
        results[name] = {
            "own": watch.own[0],
            "shown": watch.shown[0],
            "back": watch.back[0],
            "saved": watch.saved[0]["state_dict"],
            "end": everything(module),
            "val_loss": float(trainer.callback_metrics["val_loss"]),
        }
    return results


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [k for k in a if not torch.equal(a[k], b[k])]


@pytest.mark.dist
def test_validation_and_checkpoints_see_the_consensus_and_local_parameters_come_back() -> None:
    first, second = run_ranks(validated, 2, init="env", deadline=150)
    for name in first:
        a, b = first[name], second[name]
        assert not differ(a["shown"], b["shown"]), f"{name}: ranks validate different models"
        assert not differ(a["own"], a["back"]), f"{name}: local parameters did not come back"
        assert not differ(b["own"], b["back"]), name
        assert not differ(a["saved"], a["shown"]), f"{name}: what is saved is not what is validated"
        assert not differ(a["end"], b["end"]), f"{name}: replicas end different"
        assert a["val_loss"] == b["val_loss"], name
        if name != "delayed":
            assert differ(a["own"], b["own"]), f"{name}: replicas did not train on their own"
        plain = Toy()
        plain.load_state_dict(a["saved"])


class Nosy(Toy):
    """A module with collectives of its own in a training step."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.logged: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.what == "mean":
            self.log("shared", loss.detach(), sync_dist=True)
            self.logged.append(float(self.trainer.strategy.reduce(loss.detach())))
        elif self.what == "sum":
            self.log("shared", loss.detach(), sync_dist=True, reduce_fx="sum")
        elif self.what == "gather":
            self.all_gather(loss.detach())
        elif self.what == "broadcast":
            self.trainer.strategy.broadcast(batch_idx)
        else:
            self.trainer.strategy.barrier()
        return loss


def nosy(rank: int, world: int) -> dict[str, Any]:
    module = Nosy("mean")
    with census() as calls:
        strategy = ls.strategy("local_sgd", sync_every=4)
        fit(module, strategy, world, 8)
    found: dict[str, Any] = {"local": module.logged == module.losses, "calls": len(calls)}
    for what in ("sum", "gather", "broadcast", "barrier"):
        try:
            fit(Nosy(what), ls.strategy("local_sgd"), world, 8)
        except RuntimeError as error:
            found[what] = str(error)
    return found


@pytest.mark.dist
def test_collectives_of_a_training_step_stay_local_or_are_refused() -> None:
    for found in run_ranks(nosy, 2, init="env", deadline=100):
        assert found["local"], "a mean logged in a step is the rank's own"
        assert "inside a training step makes every rank wait" in found["sum"]
        for what, name in {"gather": "all_gather", "broadcast": "broadcast", "barrier": "barrier"}.items():
            assert f"{name} inside a training step" in found[what]


def averaged(rank: int, world: int) -> None:
    for callback in (WeightAveraging(), EMAWeightAveraging(), StochasticWeightAveraging(1e-2)):
        with pytest.raises(ValueError, match=f"{type(callback).__name__}.*strategy='hybrid'"):
            fit(Toy(), ls.strategy("local_sgd"), world, callbacks=[callback])
    with pytest.warns(UserWarning, match=r"about 1 exchanges \(12 steps, sync_every=8.*Lower sync_every"):
        fit(Toy(), ls.strategy("local_sgd"), world, 12)


@pytest.mark.dist
def test_callbacks_that_average_over_time_are_refused_and_few_exchanges_warned_about() -> None:
    run_ranks(averaged, 1, init="env")


class Batches(Callback):
    """Counts the collectives of every batch of the whole process."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.per_batch, self.before = calls, [], 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.before = len(self.calls)

    def on_train_batch_end(self, *args: Any) -> None:
        self.per_batch.append(len(self.calls) - self.before)


def counted(rank: int, world: int) -> dict[str, list[int]]:
    found = {}
    for name, options in {
        "local_sgd": {"sync_every": 4},
        "diloco": {"sync_every": 4, "warmup_steps": 2},
        "streaming_diloco": {"sync_every": 8, "fragments": 2, "overlap_steps": 2, "warmup_steps": 0},
        "hybrid": {"sync_every": ls.Growing(start=2, every=1, limit=50)},
    }.items():
        with census() as calls:
            batches = Batches(calls)
            fit(Toy(), ls.strategy(name, **options), world, 14, callbacks=[batches])
        found[name] = batches.per_batch
    return found


@pytest.mark.dist
def test_between_exchanges_nothing_is_sent() -> None:
    for found in run_ranks(counted, 2, init="env", deadline=100):
        busy = {name: [i + 1 for i, n in enumerate(per_batch) if n] for name, per_batch in found.items()}
        assert busy["local_sgd"] == [4, 8, 12, 14], busy
        assert busy["diloco"] == [1, 2, 6, 10, 14], busy
        # Started two steps before they take effect; the communication thread may need until the next batch to issue.
        assert set(busy["streaming_diloco"]) <= {2, 3, 4, 6, 7, 8, 10, 11, 12, 14}, busy
        assert busy["hybrid"] == [2, 6, 14], busy


class Scaled(Toy):
    """One rank's loss overflows once."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.overflows = rank == 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.overflows and batch_idx == 2 else loss


class Uneven(Sharded):
    """Rank r has 6 + 3 r batches."""

    def __init__(self, rank: int, world_size: int, **options: Any) -> None:
        super().__init__(rank, world_size, **options)
        self.shard = range(24 + 12 * rank)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(Noise(), list(self.shard)), batch_size=4)


def clocks(rank: int, world: int) -> dict[str, tuple[int, int, float]]:
    found: dict[str, tuple[int, int, float]] = {}

    def run(case: str, module: LightningModule, strategy: Any, steps: int, **options: Any) -> None:
        fit(module, strategy, world, steps, **options)
        total = float(sum(p.detach().double().sum() for p in module.parameters()))
        found[case] = (strategy.counters.steps, strategy.counters.exchanges, total)

    for name, options in {"local_sgd": {"sync_every": 3}, "delayed": {}}.items():
        run(f"{name}, two optimisers", TwoOptimisers(), ls.strategy(name, **options), 18)
        run(
            f"{name}, accumulation 4, clipping", Toy(), ls.strategy(name, **options), 6,
            accumulate_grad_batches=4, gradient_clip_val=0.5,
        )  # fmt: skip
        plugin = ls.WirePrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        run(f"{name}, one rank skips", Scaled(rank), ls.strategy(name, **options), 9, plugins=[plugin])
        uneven = Uneven(rank, world)
        run(
            f"{name}, uneven data",
            uneven,
            ls.strategy(name, **options),
            -1,
            max_epochs=2,
            use_distributed_sampler=False,
        )
    seconds = ls.HybridStrategy(sync_every_seconds=0.05 * (rank + 1))
    run("seconds", Toy(), seconds, 30)
    return found


@pytest.mark.dist
def test_clocks_count_attempted_steps_whatever_happens_in_them() -> None:
    ranks = run_ranks(clocks, 2, init="env", deadline=170)
    for case in ranks[0]:
        assert ranks[0][case] == ranks[1][case], f"{case}: replicas end different, or their clocks do"
    first = {case: row[:2] for case, row in ranks[0].items()}
    assert first["local_sgd, two optimisers"] == (9, 3)
    assert first["local_sgd, accumulation 4, clipping"] == (6, 2)
    assert first["local_sgd, one rank skips"] == (9, 3)
    assert first["local_sgd, uneven data"] == (18, 6), "until the longest is done"
    assert first["delayed, two optimisers"] == (9, 0)
    assert first["delayed, uneven data"] == (18, 0)


def hierarchy(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Toy()
    strategy = ls.strategy("hierarchical", sync_every=4, replica=2, compressor="int8")
    own: list[dict[str, Tensor]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            own.append(everything(pl_module))

    fit(module, strategy, world, 6, callbacks=[Look()])
    dist.barrier()
    return {"mid": own[5 - 1], "met": own[4 - 1], "end": everything(module)}


@pytest.mark.dist
def test_ranks_of_a_replica_stay_equal_and_replicas_meet() -> None:
    ranks = run_ranks(hierarchy, 4, init="env", deadline=120)
    parameters = [n for n, _ in Toy().named_parameters()]
    for moment, groups in {"mid": [(0, 1), (2, 3)], "met": [(0, 1, 2, 3)], "end": [(0, 1, 2, 3)]}.items():
        for group in groups:
            for rank in group[1:]:
                same = ranks[group[0]][moment]
                assert all(torch.equal(same[n], ranks[rank][moment][n]) for n in parameters), (moment, rank)
    assert any(not torch.equal(ranks[0]["mid"][n], ranks[2]["mid"][n]) for n in parameters)
    assert isinstance(Toy().norm, nn.BatchNorm1d)
