"""SIGTERM on any rank stops all ranks at one batch, and nothing is broadcast per batch to achieve it."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core import rank_zero

import lightning_sync as ls
from lightning_sync.checkpoint.describe import describe
from tests.checkpoint.runs import Said
from tests.models import Toy, fit
from tests.workers import run_ranks

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "barrier",
    "all_to_all_single",
    "all_gather",
    "reduce",
    "gather",
    "all_gather_into_tensor",
)


class TermAtBatch(Callback):
    """Rank 1 gets a SIGTERM in batch 5 of the first epoch."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


class Ended(Callback):
    """How far each rank came."""

    batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1


def stopped(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for name, strategy in {
        "strict": ls.StrictStrategy(),
        "strict, int8": ls.StrictStrategy(compressor="int8"),
        "un-wrapped, one replica": ls.UnwrappedStrategy(replica=world_size),
        "un-wrapped, every rank alone": ls.UnwrappedStrategy(replica="rank"),
    }.items():
        torch.manual_seed(0)
        ended = Ended()
        try:
            fit(Toy(), strategy, world_size, max_steps=100_000, callbacks=[TermAtBatch(), ended])
            results[name] = ("not stopped", ended.batches)
        except SystemExit as stop:
            results[name] = (type(stop).__name__, ended.batches)
        dist.barrier()
    return results


@pytest.mark.dist
def test_sigterm_on_one_rank_stops_all_at_the_same_batch() -> None:
    ranks = run_ranks(stopped, 3, init="env", deadline=120)
    for name, (how, batches) in ranks[0].items():
        assert how == "SIGTERMException", name
        assert batches >= 5
        assert [r[name] for r in ranks] == [(how, batches)] * 3, name


class Census(Callback):
    """Counts every collective that Python starts while batches run, whoever starts it."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.batches = 0
        self._originals: dict[str, Any] = {}

    def on_train_start(self, *args: Any) -> None:
        for name in COLLECTIVES:
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, self._counting(name))

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1
        if self.batches == 8:  # before the end of training, which has barriers of its own
            for name, original in self._originals.items():
                setattr(dist, name, original)

    def _counting(self, name: str) -> Any:
        original = self._originals[name]

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return original(*args, **kwargs)

        return counted


def census(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    results = {}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "strict": (ls.StrictStrategy(), {}),
        "strict, int8": (ls.StrictStrategy(compressor="int8"), {}),
        "strict, int8, accumulate 4": (ls.StrictStrategy(compressor="int8"), {"accumulate_grad_batches": 4}),
        "alone": (ls.UnwrappedStrategy(replica="rank"), {}),
    }
    for name, (strategy, options) in cases.items():
        torch.manual_seed(0)
        callback = Census()
        fit(Toy(), strategy, world_size, max_steps=-1, max_epochs=1, callbacks=[callback], **options)
        results[name] = callback.counts
    return results


@pytest.mark.dist
def test_nothing_is_sent_that_the_mode_does_not_need() -> None:
    counts = run_ranks(census, 2, init="env", deadline=90)[0]
    assert counts["strict"] == {}, "the stock reducer works in C++, and Lightning's broadcast per batch is gone"
    assert counts["strict, int8"] == {"all_to_all_single": 8 * 2, "all_reduce": 8 * 1}, (
        "matrices in two phases, vectors in one"
    )
    assert counts["strict, int8, accumulate 4"] == {"all_to_all_single": 2 * 2, "all_reduce": 2 * 1}
    assert counts["alone"] == {}


def interrupt(rank: int, world_size: int, sign: int, mode: str, folder: Path) -> tuple[str, str, int, str]:
    """Rank 1 (or the only one) gets a signal in batch 6 of a run that keeps checkpoints."""

    class Interrupt(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_rank == world_size - 1 and trainer.global_step == 5:
                os.kill(os.getpid(), sign)

    torch.manual_seed(0)
    strategy: Any = ls.UnwrappedStrategy(replica="rank") if mode == "alone" else ls.StrictStrategy(compressor="int8")
    keep = ModelCheckpoint(folder, every_n_train_steps=100_000)
    ended = "no"
    try:
        fit(Toy(), strategy, world_size, max_steps=100_000, enable_checkpointing=True, callbacks=[Interrupt(), keep])
    except SystemExit as stop:
        ended = type(stop).__name__
    trainer = strategy.attached_trainer()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "put back after the run"
    return ended, str(strategy.stopped_because), trainer.global_step, str(strategy.stopped_at)


def go_on(rank: int, world_size: int, mode: str, path: str, steps: int) -> tuple[int, int, list[str]]:
    torch.manual_seed(1)
    strategy: Any = ls.UnwrappedStrategy(replica="rank") if mode == "alone" else ls.StrictStrategy(compressor="int8")
    said = Said()
    rank_zero.log.addHandler(said)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
        trainer = fit(Toy(), strategy, world_size, max_steps=steps, ckpt_path=path)
    return trainer.global_step, strategy.counters.steps, said.lines


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sign", "mode", "world_size"),
    [
        (signal.SIGTERM, "alone", 2),
        (signal.SIGUSR1, "strict", 2),
        (signal.SIGUSR1, "strict", 1),
    ],
)
def test_a_signal_saves_what_a_new_run_goes_on_from(
    sign: signal.Signals, mode: str, world_size: int, tmp_path: Path
) -> None:
    ranks = run_ranks(interrupt, world_size, sign, mode, tmp_path, init="env", deadline=120)
    assert len(set(ranks)) == 1, ranks
    ended, why, step, path = ranks[0]
    assert ended == "SIGTERMException"
    assert sign.name in why
    assert step >= 6
    assert Path(path) == tmp_path / f"stopped-step={step}.ckpt"
    assert f"step        {step}" in describe(path)
    resumed = run_ranks(go_on, world_size, mode, path, step + 3, init="env", deadline=120)
    assert [r[:2] for r in resumed] == [(step + 3, step + 3)] * world_size
    assert any("bit for bit" in line for line in resumed[0][2]), resumed[0][2]
