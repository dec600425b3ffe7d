"""Delayed is strict, shifted by hand."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sync as ls
from tests.models import fit
from tests.strategies import by_hand
from tests.strategies.by_hand import Sharded, Shifted
from tests.strategies.test_nonfinite import BAD, Poisoned
from tests.workers import run_ranks

STEPS = 13
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "AdamW": ({"adam": True, "lr": 1e-2}, {}, 1),
    "AdamW, accumulation 2": ({"adam": True, "lr": 1e-2}, {}, 2),
    "SGD, two steps": ({"lr": 0.02}, {"delay": 2}, 1),
    "SGD, compensated": ({"lr": 0.02}, {"compensation": 0.5}, 1),
}


def make(rank: int, world: int, model: dict[str, Any]) -> Sharded:
    torch.manual_seed(3)
    return Sharded(rank, world, alternate=True, **model)


def against_hand(rank: int, world: int) -> dict[str, float]:
    found = {}
    for case, (model, options, accumulate) in CASES.items():
        module = make(rank, world, model)
        strategy = ls.strategy("delayed", bucket_cap_mb=0.005, **options)
        fit(module, strategy, world, max_steps=STEPS, use_distributed_sampler=False, accumulate_grad_batches=accumulate)
        shifted = Shifted(**options)
        by_them = by_hand.train(
            make(rank, world, model), STEPS, lambda step, params: None, shifted.gradients, accumulate
        )
        mine = {n: p.detach() for n, p in module.named_parameters()}
        found[case] = max(float((mine[n].double() - by_them[n].double()).abs().max()) for n in mine)
        assert strategy.counters.steps == STEPS
    return found


@pytest.mark.dist
def test_delayed_equals_hand_shifted_strict() -> None:
    for errors in run_ranks(against_hand, 3, init="env", deadline=150):
        assert {name: error < 1e-6 for name, error in errors.items()} == dict.fromkeys(CASES, True), errors


def buffers_and_parameters(rank: int, world: int) -> dict[str, Tensor]:
    module = make(rank, world, {"adam": True, "lr": 1e-2})
    fit(module, ls.strategy("delayed", compressor="int8"), world, max_steps=STEPS, use_distributed_sampler=False)
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


@pytest.mark.dist
def test_replicas_end_equal_by_bits_buffers_included() -> None:
    first, *others = run_ranks(buffers_and_parameters, 3, init="env")
    for other in others:
        assert all(torch.equal(first[k], other[k]) for k in first)


def poisoned(rank: int, world: int, policy: str | None, name: str, compressor: str | None) -> Any:
    torch.manual_seed(0)
    module = Poisoned(adam=True)
    options = {"sync_every": 3} if name == "local_sgd" else {}
    strategy = ls.strategy(name, compressor=compressor, non_finite=policy, **options)
    try:
        fit(module, strategy, world, 9)
    except Exception as error:
        return str(error)
    weights = [w["last.weight"] for w in module.weights]
    return [torch.equal(a, b) for a, b in pairwise(weights)], strategy.counters.skipped_steps, weights[-1]


@pytest.mark.dist
def test_a_gradient_that_is_not_finite_skips_one_step_on_all_ranks() -> None:
    (still, skipped, weight), second = run_ranks(poisoned, 2, "skip", "delayed", "int8", init="env")
    assert [i for i, same in enumerate(still) if same] == [0 if BAD == 0 else BAD], (
        "applied a step later than it was bad"
    )
    assert skipped == 1
    assert torch.equal(weight, second[2])


@pytest.mark.dist
@pytest.mark.parametrize(("name", "compressor"), [("delayed", "int8"), ("local_sgd", None)])
def test_or_ends_the_run_with_its_name(name: str, compressor: str | None) -> None:
    for text in run_ranks(poisoned, 2, None, name, compressor, init="env"):
        assert "layers.0.weight" in text or "first.weight" in text, text
        assert "on rank 1" in text
