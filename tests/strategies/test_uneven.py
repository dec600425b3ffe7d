"""Ranks with 3, 5 and 9 batches: all data is used, nobody hangs, and everything that counts steps agrees."""

import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

import lightning_sync as ls
from lightning_sync.strategies import NAMES
from tests.models import Noise, Toy, everything, fit
from tests.strategies.documents import Documents, Reader, alone, apart, furthest
from tests.workers import run_ranks

BATCHES, VAL, WORLD, EPOCHS = (3, 5, 9), (2, 4, 1), 3, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "local_sgd": {"sync_every": 4},
    "post_local_sgd": {"sync_every": 4, "warmup_steps": 7},
    "hierarchical": {"sync_every": 4, "replica": 3},
    "hybrid": {"sync_every": 4, "overlap_steps": 2},
    "diloco": {"sync_every": 4, "warmup_steps": 3},
    "streaming_diloco": {"sync_every": 8, "fragments": 2, "overlap_steps": 3, "warmup_steps": 2},
    "slowmo": {"sync_every": 4},
    "easgd": {"sync_every": 4},
}


class Stream(IterableDataset[Any]):
    """As many samples, but nobody says how many."""

    def __init__(self, size: int) -> None:
        self.data = Subset(Noise(), range(size))

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data[i] for i in range(len(self.data))])


class Uneven(Toy):
    """Rank r has BATCHES[r] batches for training and VAL[r] for validation; counts what it is given."""

    def __init__(self, rank: int, stream: bool = False, seconds: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.rank, self.stream, self.seconds = rank, stream, seconds
        self.seen: list[tuple[int, int]] = []
        self.validated: list[float] = []
        self.scheduled = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch_idx))
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.validated.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def rate(self, step: int) -> float:
        self.scheduled = step
        return 0.9**step

    def train_dataloader(self) -> DataLoader[Any]:
        size = 4 * BATCHES[self.rank]
        return DataLoader(Stream(size) if self.stream else Subset(Noise(), range(size)), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(Noise(), range(4 * VAL[self.rank])), batch_size=4)


def train(module: LightningModule, strategy: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_epochs": EPOCHS, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    return fit(module, strategy, WORLD, -1, **{**defaults, "limit_val_batches": 1.0, **options})


AGGREGATED = {"strict": {}, "delayed": {}, "local_sgd": {"sync_every": 4}}


def every_mode(rank: int, world: int, aggregators: tuple[str | None, ...]) -> dict[str, Any]:
    found = {}
    names = [(n, OPTIONS.get(n, {})) for n in NAMES] if aggregators == (None,) else [*AGGREGATED.items()]
    for stream, aggregator in product((False, True), aggregators):
        for name, options in names:
            torch.manual_seed(3)
            module = Uneven(rank, stream, lr=0.05 if aggregator is None else 0.01)
            strategy = ls.strategy(name, aggregator=aggregator, **options)
            trainer = train(module, strategy)
            found[f"{name}, {'stream' if stream else 'lengths'}, {aggregator}"] = {
                "seen": module.seen,
                "validated": module.validated,
                "val_loss": float(trainer.callback_metrics["val_loss"]),
                "clocks": (trainer.global_step, strategy.counters.steps, module.scheduled, trainer.current_epoch),
                "end": {n: p.detach().clone() for n, p in module.named_parameters()},
                "limit": trainer.limit_train_batches,
                "tracked": int(module.norm.num_batches_tracked),
            }
    return found


@pytest.mark.dist
@pytest.mark.parametrize("aggregators", [(None,), ("median", "sum")])
def test_every_mode_uses_all_data_and_all_clocks_agree(aggregators: tuple[str | None, ...]) -> None:
    ranks = run_ranks(every_mode, WORLD, aggregators, init="env", deadline=175)
    for case in ranks[0]:
        losses: list[float] = []
        for rank, found in enumerate(ranks):
            mine = found[case]
            assert mine["seen"] == [(e, i) for e in range(EPOCHS) for i in range(BATCHES[rank])], case
            assert len(mine["validated"]) == EPOCHS * VAL[rank], case
            assert mine["clocks"] == (18, 18, 18, EPOCHS), case
            assert mine["limit"] == 1.0, case
            if "hybrid" not in case and "streaming" not in case:  # overlapped exchanges bring counts of the past back
                assert mine["tracked"] == 18, f"{case}: BatchNorm's statistics go on with the ranks that have data"
            losses += mine["validated"][-VAL[rank] :]
            assert all(torch.equal(p, ranks[0][case]["end"][n]) for n, p in mine["end"].items()), case
        for found in ranks:
            assert found[case]["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5), case


STRATEGIES: dict[str, Any] = {
    "strict": lambda **o: ls.StrictStrategy(bucket_cap_mb=0.0005, **o),
    "strict, unused looked for": lambda **o: ls.StrictStrategy(find_unused_parameters=True, **o),
    "strict, static graph": lambda **o: ls.StrictStrategy(static_graph=True, **o),
    "strict, two levels": lambda **o: ls.StrictStrategy(two_level=True, **o),
    "one replica": lambda **o: ls.UnwrappedStrategy(replica=WORLD, bucket_cap_mb=0.0005, **o),
    "hybrid, warming up": lambda **o: ls.HybridStrategy(warmup_steps=100, **o),
    "delayed": lambda **o: ls.DelayedStrategy(bucket_cap_mb=0.0005, **o),
}


class StreamReader(Reader):
    """Reads documents, and does not know how many there are."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_Iterable(self.data), batch_size=2)


class _Iterable(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter([self.data[i] for i in range(len(self.data))])


def against_one_process(rank: int, world: int) -> dict[str, float]:
    data: list[Any] = [Documents(r, 2 * BATCHES[r]) for r in range(world)]
    errors = {}

    def run(name: str, kind: type[Reader], strategy: Any, expected: Any, window: int = 1) -> None:
        module = kind(data[rank])
        train(module, strategy, max_epochs=1, precision="64-true", accumulate_grad_batches=window)
        errors[name] = furthest(module, expected)

    for name, make in STRATEGIES.items():
        delay = int(name == "delayed")
        for window in (1,) if "static" in name else (1, 4):  # torch: a static graph begins with a reduction
            expected = alone(data, [2] * world, window, delay=delay)
            run(f"{name}, tokens, {window}", Reader, make(aggregator="weighted_mean"), expected, window)
        expected = alone(data, [2] * world, 1, delay=delay, ranks_alike=True)
        for kind in (Reader, StreamReader):
            run(f"{name}, mean, {kind.__name__}", kind, make(), expected)
    run("int8 strict, tokens", StreamReader, ls.StrictStrategy(aggregator="weighted_mean"), alone(data, [2] * 3, 1))
    for kind in (Reader, StreamReader):
        apart_by_tokens = ls.HybridStrategy(sync_every=2, aggregator="weighted_mean")
        run(f"apart, tokens, {kind.__name__}", kind, apart_by_tokens, apart(data, 1, 2))
        apart_by_batches = ls.HybridStrategy(sync_every=2)
        run(f"apart, mean, {kind.__name__}", kind, apart_by_batches, apart(data, 1, 2, by_tokens=False))
    return errors


@pytest.mark.dist
def test_a_rank_without_data_weighs_nothing() -> None:
    for errors in run_ranks(against_one_process, WORLD, init="env", deadline=175):
        assert {case: error for case, error in errors.items() if error > 1e-10} == {}
        assert len(errors) == 32


class Listing(Logger):
    """Remembers the values of a key."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []

    name = version = "listing"  # type: ignore[assignment]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged += [v for k, v in metrics.items() if k == "loss"]


class Quiet(Callback):
    """Looks at the random generator around batches without data, and at the statistics of BatchNorm."""

    def __init__(self) -> None:
        self.moved: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before = torch.get_rng_state()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not torch.equal(self.before, torch.get_rng_state()):
            self.moved.append(batch_idx)


class Nosy(Uneven):
    """Draws random numbers and logs means over ranks in its training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.rand(1)
        loss = super().training_step(batch, batch_idx)
        self.log("shared", loss, sync_dist=True)
        return loss


def side_effects(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name in ("strict", "delayed", "local_sgd"):
        for stream in (False, True):
            torch.manual_seed(3)
            quiet, listing, module = Quiet(), Listing(), Nosy(rank, stream, lr=0.0)
            start = {n: b.clone() for n, b in module.named_buffers()}
            train(module, ls.strategy(name), max_epochs=1, callbacks=[quiet], logger=listing, limit_val_batches=0)
            chained = Toy(lr=0.0)
            chained.load_state_dict({**everything(module), **start})
            for index in range(max(BATCHES)):  # the batches of the lowest rank that has data
                chained(torch.stack([Noise()[i][0] for i in range(4 * index, 4 * index + 4)]))
            found[f"{name}, {stream}"] = {
                "moved": quiet.moved,
                "logged": listing.logged,
                "losses": module.losses,
                "off": float((module.norm.running_mean - chained.norm.running_mean).abs().max()),
            }
    return found


@pytest.mark.dist
def test_without_data_nothing_is_logged_drawn_or_normalised() -> None:
    for rank, found in enumerate(run_ranks(side_effects, WORLD, init="env", deadline=150)):
        for case, seen in found.items():
            assert seen["moved"] == list(range(BATCHES[rank])), case
            if rank == 0:  # Lightning gives the loggers to rank 0 only
                assert seen["logged"] == pytest.approx(seen["losses"]), case
            if case.startswith("strict") and rank == 2:
                assert seen["off"] < 1e-6, f"{case}: all ranks hold the same samples in the same order here"


class ByHand(Uneven):
    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__(rank, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.seen.append((self.current_epoch, batch_idx))
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


class TwoLoaders(Uneven):
    def train_dataloader(self) -> Any:
        return {"a": super().train_dataloader(), "b": super().train_dataloader()}


class Nothing(Uneven):
    """Rank 0 has nothing at all."""

    def train_dataloader(self) -> DataLoader[Any]:
        size = 4 * BATCHES[self.rank] if self.rank else 0
        return DataLoader(Stream(size) if self.stream else Subset(Noise(), range(size)), batch_size=4)


def options(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def attempt(case: str, module: Uneven, strategy: Any) -> None:
        try:
            trainer = train(module, strategy, max_epochs=1, limit_val_batches=0)
            found[case] = (len(module.seen), trainer.global_step)
        except ValueError as error:
            found[case] = str(error)

    for name in ("strict", "delayed", "local_sgd"):
        attempt(f"{name}, shortest", Uneven(rank), ls.strategy(name, uneven="shortest"))
        attempt(f"{name}, shortest stream", Uneven(rank, True), ls.strategy(name, uneven="shortest"))
        attempt(f"{name}, by hand", ByHand(rank), ls.strategy(name))
        attempt(f"{name}, join by hand", ByHand(rank), ls.strategy(name, uneven="join"))
        attempt(f"{name}, two loaders", TwoLoaders(rank), ls.strategy(name))
        attempt(f"{name}, nothing", Nothing(rank), ls.strategy(name))
        attempt(f"{name}, nothing in a stream", Nothing(rank, True), ls.strategy(name))
    return found


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:Total length of")
def test_options_and_what_they_do_not_go_with() -> None:
    for rank, found in enumerate(run_ranks(options, WORLD, init="env", deadline=175)):
        for name in ("strict", "delayed", "local_sgd"):
            assert found[f"{name}, shortest"] == (3, 3)
            assert found[f"{name}, by hand"] == (3, 3), "manual optimisation: the shortest"
            assert "uneven='join' does not go with manual optimisation" in found[f"{name}, join by hand"]
            assert "does not go with several training loaders" in found[f"{name}, two loaders"]
            assert found[f"{name}, nothing"] == (BATCHES[rank] if rank else 0, 9)
            assert found[f"{name}, nothing in a stream"] == (BATCHES[rank] if rank else 0, 9)
        assert found["strict, shortest stream"] == found["delayed, shortest stream"] == (3, 3)
        assert "uneven='shortest' needs loaders with a length" in found["local_sgd, shortest stream"]


def test_a_wrong_option_names_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"uneven='longest'.*'join', 'shortest'"):
        ls.StrictStrategy(uneven="longest")


class Clock(Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        self.began = time.monotonic()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.seconds = time.monotonic() - self.began


def timed(rank: int, world: int, names: tuple[str, ...], seconds: float) -> dict[str, float]:
    """How long an epoch takes, over how long it takes where all ranks have as much as the longest."""

    def epoch(name: str, number: int, stream: bool) -> float:
        clock, module = Clock(), Uneven(number, stream, seconds)
        strategy = ls.strategy(name, **OPTIONS.get(name, {}))
        train(module, strategy, callbacks=[clock], limit_val_batches=0, max_epochs=1)
        return clock.seconds

    longest = BATCHES.index(max(BATCHES))
    even = {name: epoch(name, longest, stream=False) for name in names}
    return {f"{n}, {stream}": epoch(n, rank, stream) / even[n] for stream in (False, True) for n in names}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_an_epoch_takes_as_long_as_its_longest_rank(part: int) -> None:
    for found in run_ranks(timed, WORLD, tuple(NAMES)[part::2], 0.3, init="env", deadline=175):
        assert {case: ratio for case, ratio in found.items() if ratio > 1.1} == {}
