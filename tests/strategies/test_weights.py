"""A weighted mean is what one process computes on all data at once; a mean of means is not."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sync as ls
from tests.models import fit
from tests.strategies.documents import (
    Documents,
    KeyReader,
    ManualReader,
    Reader,
    SizeReader,
    alone,
    apart,
    furthest,
)
from tests.workers import run_ranks

# 22 documents in batches of 2 are 11 micro-batches: windows of 4, 4 and 3.
SIZE, ACCUMULATE, WORLD = 22, 4, 3
DATA: list[Any] = [Documents(r, SIZE) for r in range(WORLD)]
STRATEGIES: dict[str, Any] = {
    "strict": lambda **o: ls.StrictStrategy(bucket_cap_mb=0.0005, **o),
    "unwrapped": lambda **o: ls.UnwrappedStrategy(replica=WORLD, bucket_cap_mb=0.0005, **o),
    "hybrid, warming up": lambda **o: ls.HybridStrategy(warmup_steps=100, **o),
    "delayed": lambda **o: ls.DelayedStrategy(bucket_cap_mb=0.0005, **o),
}
CASES: dict[str, tuple[type[Reader], dict[str, Any], dict[str, Any]]] = {
    "a method": (Reader, {}, {}),
    "a key": (KeyReader, {}, {}),
    "clipped": (Reader, {"gradient_clip_val": 0.5}, {"clip": 0.5}),
}


def run(kind: type[Reader], rank: int, strategy: Any, data: Any = None, **options: Any) -> Reader:
    module = kind(DATA[rank] if data is None else data, **options.pop("module", {}))
    defaults = {"accumulate_grad_batches": ACCUMULATE, "precision": "64-true"}
    fit(module, strategy, WORLD, -1, max_epochs=1, use_distributed_sampler=False, **{**defaults, **options})
    return module


def against_one_process(rank: int, world: int) -> dict[str, float]:
    errors = {}
    unequal: list[Any] = [Documents(r, SIZE * (r + 1) // 2) for r in range(world)]
    for name, make in STRATEGIES.items():
        delay = int(name == "delayed")
        for case, (kind, trainer, hand) in CASES.items():
            if case != "a key" or name == "strict":
                module = run(kind, rank, make(aggregator="weighted_mean"), **trainer)
                errors[f"{name}, {case}"] = furthest(module, alone(DATA, [2] * world, ACCUMULATE, delay=delay, **hand))
        module = run(Reader, rank, make(aggregator="weighted_mean", local_clip_norm=0.3))
        expected = alone(DATA, [2] * world, ACCUMULATE, delay=delay, clip_each=0.3)
        errors[f"{name}, clipped rank by rank"] = furthest(module, expected)
        expected = alone(unequal, [r + 1 for r in range(world)], ACCUMULATE, tokens=False, delay=delay)
        module = run(SizeReader, rank, make(aggregator="weighted_mean"), unequal[rank], module={"batch_size": rank + 1})
        errors[f"{name}, batch sizes by rank"] = furthest(module, expected)
        by_hand = run(
            ManualReader, rank, make(aggregator="weighted_mean"), module={"window": ACCUMULATE},
            accumulate_grad_batches=1,
        )  # fmt: skip
        expected = alone(DATA, [2] * world, ACCUMULATE, delay=delay)
        errors[f"{name}, manual optimisation"] = furthest(by_hand, expected)
        errors[f"{name}, plain mean"] = furthest(run(Reader, rank, make()), expected)
    module = run(Reader, rank, ls.HybridStrategy(sync_every=2, aggregator="weighted_mean"))
    errors["hybrid, apart"] = furthest(module, apart(DATA, ACCUMULATE, 2))
    module = run(Reader, rank, ls.HybridStrategy(sync_every=2, aggregator="weighted_mean"), accumulate_grad_batches=1)
    errors["hybrid, apart, no accumulation"] = furthest(module, apart(DATA, 1, 2))
    errors["hybrid, apart, plain mean"] = furthest(
        run(Reader, rank, ls.HybridStrategy(sync_every=2)), apart(DATA, ACCUMULATE, 2)
    )
    return errors


@pytest.mark.dist
def test_it_is_what_one_process_computes_on_the_concatenated_data_and_a_mean_of_means_is_not() -> None:
    for errors in run_ranks(against_one_process, WORLD, init="env", deadline=170):
        for case, error in errors.items():
            if case.endswith("plain mean"):
                assert error > 1e-2, f"{case}: {error}"
            else:
                assert error < 1e-10, f"{case}: {error}"


class Padding(Reader):
    """Rank 1 has nothing but padding in every third micro-batch: its loss is 0/0 there."""

    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(data, **options)
        self.seen: list[float] = []

    def train_dataloader(self) -> Any:
        data = self.data
        data.mask = data.mask.clone()
        if self.global_rank == 1:
            data.mask.view(-1, 2, data.mask.shape[1])[2::3] = False
        return super().train_dataloader()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(float(loss))
        return loss


class Huge(Reader):
    """Counts in units of which a million make a token, as far as float16 is concerned."""

    def batch_weight(self, batch: Any) -> Tensor:
        return batch[2].sum() * 2**20


def padded(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    data: list[Any] = [Documents(r, SIZE) for r in range(world)]
    data[1].mask.view(-1, 2, data[1].mask.shape[1])[2::3] = False
    for name, make in STRATEGIES.items():
        for window in (1, ACCUMULATE):
            module = run(
                Padding, rank, make(aggregator="weighted_mean"), Documents(rank, SIZE), accumulate_grad_batches=window
            )
            assert any(x != x for x in module.seen) == (rank == 1)
            expected = alone(data, [2] * world, window, delay=int(name == "delayed"))
            found[f"{name}, windows of {window}"] = furthest(module, expected)
    # Under a loss scaler, compressed, counted in millions.
    weights = {}
    for kind in (Reader, Huge):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugin = ls.WirePrecision("16-mixed", compressor="int8", scaler=scaler)
        strategy = ls.StrictStrategy(aggregator="weighted_mean")
        module = run(
            kind, rank, strategy, Documents(rank, SIZE), plugins=[plugin], precision=None,
            module={"dtype": torch.float32},
        )  # fmt: skip
        weights[kind] = dict(module.named_parameters())
        found[f"16-mixed, {kind.__name__}"] = furthest(module, alone(DATA, [2] * world, ACCUMULATE))
        assert strategy.counters.skipped_steps == 0
    assert all(torch.equal(p, weights[Huge][n]) for n, p in weights[Reader].items())
    return found


@pytest.mark.dist
def test_batches_of_padding_contribute_nothing_and_a_loss_scaler_changes_nothing() -> None:
    for errors in run_ranks(padded, WORLD, init="env", deadline=170):
        for case, error in errors.items():
            assert error < (5e-3 if case.startswith("16-mixed") else 1e-10), f"{case}: {error}"


class Wrong(Reader):
    """One wrong weight, on one rank or on all."""

    def __init__(self, data: Any, weight: float, ranks: tuple[int, ...], **options: Any) -> None:
        super().__init__(data, **options)
        self.weight, self.ranks, self.step = weight, ranks, 0

    def batch_weight(self, batch: Any) -> float:
        self.step += 1
        return self.weight if self.step == 4 and self.global_rank in self.ranks else 1.0


def wrong(rank: int, world: int) -> dict[str, str]:
    strategies = {**STRATEGIES, "local_sgd": lambda **o: ls.HybridStrategy(sync_every=8, **o)}
    cases = [(name, 0.0, (0, 1, 2)) for name in ("strict", "delayed", "local_sgd")]
    found = {}
    for name, weight, ranks in [*cases, ("strict", -1.0, (1,))]:  # the last one breaks the groups
        with pytest.raises(Exception, match="weight") as caught:
            run(
                Wrong, rank, strategies[name](aggregator="weighted_mean"), accumulate_grad_batches=1,
                module={"weight": weight, "ranks": ranks},
            )  # fmt: skip
        found[f"{name}, {weight}"] = str(caught.value)
    return found


@pytest.mark.dist
def test_weights_that_are_none_end_the_run_naming_step_and_rank() -> None:
    for rank, messages in enumerate(run_ranks(wrong, WORLD, init="env", deadline=170)):
        for case, who in {"strict": "all ranks", "delayed": "all ranks", "local_sgd": f"rank {rank}"}.items():
            assert f"step 3: the weights of all batches are 0 on {who}" in messages[f"{case}, 0.0"]
        assert "step 3, rank 1: the weight of a batch is -1" in messages["strict, -1.0"]
