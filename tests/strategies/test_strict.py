"""StrictStrategy without a compressor is DDP, bit for bit; with one, replicas stay equal, bit for bit."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

import lightning_sync as ls
from tests.models import Toy, everything, fit
from tests.workers import run_ranks

SMALL_BUCKETS = {"bucket_cap_mb": 0.005}

DDP_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "several buckets": ({}, {}, {}),
    "one bucket": ({}, {"bucket_cap_mb": 25}, {}),
    "unused on alternate steps": ({"alternate": True}, {"find_unused_parameters": True}, {}),
    "unused, accumulate 4": ({"alternate": True}, {"find_unused_parameters": True}, {"accumulate_grad_batches": 4}),
    "accumulate 4": ({}, {}, {"accumulate_grad_batches": 4}),
    "static graph": ({}, {"static_graph": True}, {}),
    "AdamW, clipping": ({"adam": True, "lr": 1e-2}, {}, {"gradient_clip_val": 0.5}),
    "gradients as bucket views": ({}, {"gradient_as_bucket_view": True}, {}),
}


def train(strategy: Any, world_size: int, model: dict[str, Any], trainer: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    module = Toy(**model)
    fit(module, strategy, world_size, **trainer)
    return everything(module)


def against_ddp(rank: int, world_size: int) -> dict[str, list[str]]:
    differs = {}
    for name, (model, ddp, trainer) in DDP_CASES.items():
        options = {**SMALL_BUCKETS, **ddp}
        expected = train(DDPStrategy(**options), world_size, model, trainer)
        ours = train(ls.StrictStrategy(**options), world_size, model, trainer)
        differs[name] = [k for k in expected if not torch.equal(expected[k], ours[k])]
    return differs


@pytest.mark.dist
def test_without_compressor_it_is_ddp_bit_for_bit() -> None:
    for differs in run_ranks(against_ddp, 3, init="env", deadline=150):
        assert differs == {name: [] for name in DDP_CASES}


COMPRESSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "bf16": ("bf16", {}, {}),
    "fp16": ("fp16", {}, {}),
    "int8": ("int8", {}, {}),
    "powersgd": (ls.PowerSGD(rank=2, warmup_steps=3), {}, {}),
    "int8, unused": ("int8", {"find_unused_parameters": True}, {"accumulate_grad_batches": 2}),
    "route": (ls.Route([("layers.0*", ls.PowerSGD(rank=1, warmup_steps=0)), ("*", ls.BlockInt8())]), {}, {}),
    "int8, static graph": ("int8", {"static_graph": True}, {}),
}


def compressed(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for name, (compressor, ddp, trainer) in COMPRESSED.items():
        strategy = ls.StrictStrategy(compressor=compressor, **{**SMALL_BUCKETS, **ddp})
        alternate = "find_unused_parameters" in ddp
        state = train(strategy, world_size, {"alternate": alternate}, {"limit_val_batches": 2, "val_check_interval": 4, **trainer})
        counters = strategy.counters
        results[name] = (state, counters.steps, counters.wire_bytes, counters.dense_bytes)
    return results


@pytest.mark.dist
def test_replicas_stay_equal_and_send_less() -> None:
    ranks = run_ranks(compressed, 3, init="env", deadline=150)
    for name in COMPRESSED:
        reference, steps, sent, dense = ranks[0][name]
        assert steps == 12, name
        assert sent < 0.75 * dense, name
        for other in ranks[1:]:
            unequal = [k for k, v in reference.items() if "running" not in k and "num_batches" not in k and not torch.equal(v, other[name][0][k])]
            assert unequal == [], name
