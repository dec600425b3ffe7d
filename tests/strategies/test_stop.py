"""SIGTERM on any rank stops all ranks at one batch, and nothing is broadcast per batch to achieve it."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

import lightning_sync as ls
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
