"""The probe trains a few steps, measures links and codecs, advises and stops; and says what it cannot probe."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

import lightning_sync as ls
from lightning_sync.monitor.probe import Probe
from tests.models import Noise, Toy
from tests.workers import launch_ranks, run_ranks


def probe(rank: int, world: int, strategy: str, count: int) -> dict[str, Any]:
    callback = Probe(steps=3, warmup=1)
    options = {"sync_every": 10**6} if strategy == "local_sgd" else {}
    trainer = Trainer(
        strategy=ls.strategy(strategy, **options),
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Toy(), DataLoader(Noise(8 * count * world), batch_size=8))
    found = {p.candidate.name: (p.slowdown, p.traffic.interface_bytes) for p in callback.predictions}
    return {"steps": trainer.global_step, "found": found, "advice": callback.advice}


@pytest.mark.dist
def test_all_ranks_find_the_same_and_stop() -> None:
    first, second = run_ranks(probe, 2, "local_sgd", 20, init="env")
    assert first == second
    assert first["steps"] == 4
    assert first["advice"]
    found = first["found"]
    assert all(slowdown >= 1 for slowdown, _ in found.values())
    assert found["strict compressor=bf16"][1] == found["strict"][1] / 2


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "count", "words"), [("strict", 20, "free of communication"), ("local_sgd", 2, "ended after 2 of 4")]
)
def test_what_cannot_be_probed_is_refused(strategy: str, count: int, words: str) -> None:
    outcomes = launch_ranks(probe, 2, strategy, count, init="env")
    assert all(o.exit_code == 1 and words in (o.error or "") + o.stderr for o in outcomes)


@pytest.mark.parametrize("options", [{"steps": 0}, {"warmup": 0}])
def test_counts_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Probe(**options)
