"""What the table of combinations says, on real ranks: every "yes" trains, every "no" is refused with its reason."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

import lightning_sync as ls
from lightning_sync import compressors
from lightning_sync.validity import PRECISIONS, refusal
from tests.models import Toy, fit
from tests.workers import run_ranks


def every_yes(rank: int, world_size: int) -> dict[str, tuple[list[float], float]]:
    results = {}
    for precision in PRECISIONS:
        for name in compressors.registry:
            if refusal("strict", name, "mean", precision) is None:
                torch.manual_seed(0)
                compressor: Any = ls.PowerSGD(rank=2, warmup_steps=1) if name == "powersgd" else name
                module = Toy()
                plugin = ls.WirePrecision(precision, compressor=compressor)  # type: ignore[arg-type]
                fit(module, ls.StrictStrategy(), world_size, max_steps=4, plugins=[plugin])
                results[f"{precision}, {name}"] = (module.losses, float(module.last.weight.detach().double().sum()))
    return results


@pytest.mark.dist
def test_every_yes_trains_and_replicas_agree() -> None:
    first, second = run_ranks(every_yes, 2, init="env", deadline=120)
    assert len(first) == len(PRECISIONS) * len(list(compressors.registry))
    for case, (losses, checksum) in first.items():
        assert len(losses) == 4, case
        assert all(math.isfinite(loss) for loss in losses), case
        assert checksum == second[case][1], case


def test_a_no_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"strategy='unwrapped' with compressor='int8'.*refused: inside a replica"):
        Trainer(accelerator="cpu", devices=1, strategy=ls.UnwrappedStrategy(compressor="int8"))
