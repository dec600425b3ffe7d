"""A run that is resumed at an epoch end is the run that was never interrupted, bit for bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision

import lightning_sync as ls
from tests.checkpoint.runs import Seen, differences, run
from tests.workers import run_ranks

COMPRESSORS: dict[str, Any] = {
    "none": None,
    "int8": "int8",
    "powersgd": ls.PowerSGD(rank=2, warmup_steps=1),
}


def strict(compressor: str) -> ls.StrictStrategy:
    return ls.StrictStrategy(COMPRESSORS[compressor], bucket_cap_mb=0.005)


def one_cold(rank: int, world_size: int, folder: Path, resume: bool) -> Any:
    # With validation, the checkpoint is written at its end, still inside the epoch.
    options: dict[str, Any] = {"epochs": 2, "limit_val_batches": 2}
    if resume:
        return run(strict("powersgd"), world_size, resume=folder / "epoch=0.ckpt", seed=99, **options)
    return run(strict("powersgd"), world_size, folder=folder, **options)


@pytest.mark.dist
def test_new_processes_go_on_bit_for_bit(tmp_path: Path) -> None:
    whole = run_ranks(one_cold, 2, tmp_path, False, init="env")
    again = run_ranks(one_cold, 2, tmp_path, True, init="env")
    for before, after in zip(whole, again, strict=True):
        assert differences(before, after) == []
        assert sum(float(t.abs().sum()) for t in before.state["residual"].values()) > 0


def controls(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    from lightning_sync import _compat

    whole = run(strict("powersgd"), world_size, epochs=2, folder=folder)
    torch.distributed.barrier()
    found = {}
    pin, _compat.pin_buckets = _compat.pin_buckets, lambda model, order: None
    found["buckets not pinned"] = differences(
        whole, run(strict("powersgd"), world_size, epochs=2, resume=folder / "epoch=0.ckpt")
    )
    _compat.pin_buckets = pin
    if rank == 0:
        (folder / "epoch=0.ckpt.sync").rename(folder / "elsewhere")
    torch.distributed.barrier()
    alone = run(strict("powersgd"), world_size, epochs=2, resume=folder / "epoch=0.ckpt")
    found["no state"] = differences(whole, alone)
    found["said"] = alone.said
    return found


@pytest.mark.dist
def test_the_comparison_notices_what_is_not_restored(tmp_path: Path) -> None:
    ranks = run_ranks(controls, 3, tmp_path, init="env", deadline=90)
    for found in ranks:
        assert "losses" in found["no state"]
        assert "residual layers.0.weight" in found["no state"]
        assert found["buckets not pinned"], "over three ranks, sums depend on where in a bucket a gradient lies"
    assert any("Move both together" in line for line in ranks[0]["said"])


# Replica, accumulation, AdamW, number of different replicas.
REPLICAS: dict[str, tuple[Any, int, bool, int]] = {
    "each rank, SGD": ("rank", 1, False, 3),
    "each rank, AdamW": ("rank", 1, True, 3),
    "each rank, accumulate 2, AdamW": ("rank", 2, True, 3),
    "one replica, AdamW": (3, 1, True, 1),
}


def unwrapped(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (replica, accumulate, adam, _) in REPLICAS.items():
        options: dict[str, Any] = {"model": {"adam": adam, "lr": 1e-2}, "accumulate_grad_batches": accumulate}
        strategy = ls.UnwrappedStrategy(replica=replica)
        whole = run(strategy, world_size, epochs=2, folder=folder / name, **options)
        strategy = ls.UnwrappedStrategy(replica=replica)
        again = run(strategy, world_size, epochs=2, resume=folder / name / "epoch=0.ckpt", seed=99, **options)
        found[name] = differences(whole, again), float(whole.weights["last.weight"].sum()), whole.optimizer
    return found


@pytest.mark.dist
def test_every_replica_goes_on_with_its_own_parameters_and_optimiser(tmp_path: Path) -> None:
    ranks = run_ranks(unwrapped, 3, tmp_path, init="env", deadline=120)
    for name, (*_, different) in REPLICAS.items():
        assert [r[name][0] for r in ranks] == [[], [], []], name
        assert len({r[name][1] for r in ranks}) == different, name
        assert len({float(r[name][2][-1].sum()) for r in ranks}) == different, name


DDP_OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "none, gradients as bucket views": ("none", {"gradient_as_bucket_view": True}, {}),
    "powersgd, gradients as bucket views": ("powersgd", {"gradient_as_bucket_view": True}, {}),
    "int8, unused parameters": ("int8", {"find_unused_parameters": True}, {"alternate": True}),
    "none, unused parameters": ("none", {"find_unused_parameters": True}, {"alternate": True}),
    "int8, median": ("int8", {"aggregator": "median"}, {}),
    "int8, Adasum": ("int8", {"aggregator": "adasum", "find_unused_parameters": True}, {"alternate": True}),
}


def with_options(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    found = {}
    for name, (compressor, options, model) in DDP_OPTIONS.items():

        def strategy(compressor: str = compressor, options: dict[str, Any] = options) -> ls.StrictStrategy:
            return ls.StrictStrategy(COMPRESSORS[compressor], bucket_cap_mb=0.005, **options)

        whole = run(strategy(), world_size, epochs=2, folder=folder / name, model=model)
        resume = folder / name / "epoch=0.ckpt"
        found[name] = differences(whole, run(strategy(), world_size, epochs=2, resume=resume, seed=99, model=model))
    return found


@pytest.mark.dist
def test_ddp_options_and_aggregators_keep_the_promise(tmp_path: Path) -> None:
    for found in run_ranks(with_options, 3, tmp_path, init="env", deadline=90):
        assert found == {name: [] for name in DDP_OPTIONS}


def static(rank: int, world_size: int, folder: Path) -> tuple[list[float], list[float]]:
    def strategy() -> ls.StrictStrategy:
        return ls.StrictStrategy("int8", bucket_cap_mb=0.005, static_graph=True)

    whole = run(strategy(), world_size, epochs=2, folder=folder)
    return whole.losses[4:], run(strategy(), world_size, epochs=2, resume=folder / "epoch=0.ckpt", seed=99).losses


@pytest.mark.dist
def test_with_a_static_graph_only_the_last_bits_may_differ(tmp_path: Path) -> None:
    """DDP records a static graph in its first backward, and lays out its buckets by it: neither can be set before."""
    for whole, again in run_ranks(static, 3, tmp_path, init="env"):
        assert again == pytest.approx(whole, rel=1e-3)


def two_nodes(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Four processes that believe to be on two hosts."""
    os.environ.update(GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    found: dict[str, Any] = {}
    for name in ("int8", "powersgd"):
        whole = run(strict(name), 2, num_nodes=2, epochs=2, folder=folder / name)
        again = run(strict(name), 2, num_nodes=2, epochs=2, resume=folder / name / "epoch=0.ckpt", seed=99)
        flat = run(
            ls.StrictStrategy(COMPRESSORS[name], two_level=False), 2, num_nodes=2, epochs=2,
            resume=folder / name / "epoch=0.ckpt",
        )  # fmt: skip
        found[name] = differences(whole, again), sorted(whole.state["residual"]), flat.said
    return found


@pytest.mark.dist
def test_two_levels_keep_the_promise_and_their_slices_are_recut(tmp_path: Path) -> None:
    ranks = run_ranks(two_nodes, 4, tmp_path, init="env", deadline=120)
    for name in ("int8", "powersgd"):
        assert [r[name][0] for r in ranks] == [[]] * 4, name
        assert ranks[0][name][1] != ranks[1][name][1], "each local rank keeps its own slices"
        assert any("spread evenly" in line for line in ranks[0][name][2])


class Overflows(Callback):
    """Each rank overflows once, at a step of its own."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == trainer.global_rank:
            pl_module.last.weight.grad.fill_(float("inf"))


def scaled(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def train(name: str, **options: Any) -> tuple[Seen, dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        strategy = ls.StrictStrategy("int8") if name == "strict" else ls.UnwrappedStrategy(replica="rank")
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        extra = [Overflows()] if name == "unwrapped" else []
        return run(strategy, world_size, epochs=2, plugins=[plugin], extra=extra, **options), scaler.state_dict()

    for name in ("strict", "unwrapped"):
        whole, scale = train(name, folder=folder / name)
        again, scale_again = train(name, resume=folder / name / "epoch=0.ckpt")
        found[name] = differences(whole, again), scale == scale_again, scale["_growth_tracker"]
    return found


@pytest.mark.dist
def test_loss_scales_go_on_also_where_they_differ(tmp_path: Path) -> None:
    ranks = run_ranks(scaled, 2, tmp_path, init="env", deadline=90)
    for name in ("strict", "unwrapped"):
        assert [r[name][:2] for r in ranks] == [([], True)] * 2, name
    assert ranks[0]["unwrapped"][2] != ranks[1]["unwrapped"][2], "each had its own"
