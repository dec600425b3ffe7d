"""Batch sizes by rank: every sample once, equally many batches, sizes by speed, and one process's gradients."""

from typing import Any

import pytest
import torch

import lightning_sync as ls
from lightning_sync.examples.by_rank import SlicesByRank, sizes_by_speed
from lightning_sync.examples.byte_lm import ByteLM
from lightning_sync.examples.python_source import PythonSource
from tests.models import everything, fit
from tests.workers import run_ranks


def test_slices_are_disjoint_and_equally_many() -> None:
    samplers = [SlicesByRank(50, [3, 1, 5], rank) for rank in range(3)]
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers] == [15, 5, 25]
    drawn = [index for part in parts for index in part]
    assert len(set(drawn)) == 45
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [list(sampler) for sampler in samplers] != parts


@pytest.mark.parametrize(
    ("total", "speeds", "sizes"),
    [(12, [1, 1, 1], [4, 4, 4]), (12, [2, 1, 1], [6, 3, 3]), (4, [100, 1], [3, 1]), (16, [3.1, 0.9], [13, 3])],
)
def test_sizes_follow_speeds_and_add_up(total: int, speeds: list[float], sizes: list[int]) -> None:
    assert sizes_by_speed(total, speeds) == sizes
    with pytest.raises(ValueError, match="each needs at least 1"):
        sizes_by_speed(len(speeds) - 1, speeds)


def trained(rank: int, world: int, alone: bool) -> Any:
    torch.manual_seed(0)
    small = {"width": 16, "depth": 1, "heads": 2, "context": 16}
    module = ByteLM(**small, lr=1e-2).double()  # type: ignore[arg-type]
    by_rank: list[int] = [9] if alone else [6, 3]
    data = PythonSource(length=16, train_sequences=45, val_sequences=4, by_rank=by_rank)
    module.train_dataloader = lambda: _loader(data, module)  # type: ignore[method-assign]
    fit(module, ls.strategy("strict", aggregator="weighted_mean"), world, 5, precision="64-true")
    sizes = None
    if not alone:
        by_speed = PythonSource(length=16, train_sequences=64, val_sequences=4, batch_size=4, by_rank="speed")
        sizes = _loader(by_speed, module).batch_size
    return everything(module), sizes


def _loader(data: PythonSource, module: Any) -> Any:
    data.trainer = module.trainer
    data.setup("fit")
    return data.train_dataloader()


@pytest.mark.dist
def test_two_ranks_with_other_batch_sizes_train_as_one_process_with_their_sum() -> None:
    ((expected, _),) = run_ranks(trained, 1, True, init="env", deadline=90)
    (first, one), (second, other) = run_ranks(trained, 2, False, init="env", deadline=120)
    assert one + other == 8, "measured: batch_size on average"
    for name, value in expected.items():
        assert torch.allclose(first[name], value, rtol=0, atol=1e-8), name
        assert torch.equal(first[name], second[name]), name


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"by_rank\[1\]=0"):
        PythonSource(by_rank=[4, 0])
    with pytest.raises(ValueError, match="by_rank='fast'"):
        PythonSource(by_rank="fast")  # type: ignore[arg-type]
