"""Every form of the hybrid mode is what its paper says, written out by hand in plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sync as ls
from tests.models import fit
from tests.strategies import by_hand
from tests.strategies.by_hand import Periodic, Sharded
from tests.workers import run_ranks

STEPS = 22  # not a multiple of the periods: the last exchange is a short one


def ours(rank: int, world: int, strategy: Any, model: dict[str, Any], **trainer: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Sharded(rank, world, alternate=True, **model)
    fit(module, strategy, world, max_steps=STEPS, use_distributed_sampler=False, **trainer)
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def hand(rank: int, world: int, model: dict[str, Any], every: int, outer: Any, **rule: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Sharded(rank, world, alternate=True, **model)
    periodic = Periodic(by_hand.trained(module), every, STEPS, outer, **rule)
    return by_hand.train(module, STEPS, periodic.after, periodic.gradients)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


ADAM: dict[str, Any] = {"adam": True, "lr": 1e-2}
SGD: dict[str, Any] = {"lr": 0.02}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, Callable[[], Any], dict[str, Any]]] = {
    "local SGD": ("local_sgd", {"sync_every": 4}, SGD, 4, lambda: by_hand.averaging, {}),
    "local SGD, AdamW": ("local_sgd", {"sync_every": 4}, ADAM, 4, lambda: by_hand.averaging, {}),
    "post-local SGD": (
        "post_local_sgd",
        {"sync_every": 5, "warmup_steps": 7},
        SGD,
        5,
        lambda: by_hand.averaging,
        {"warmup": 7},
    ),
    "DiLoCo": (
        "diloco",
        {"sync_every": 4, "warmup_steps": 3},
        ADAM,
        4,
        lambda: by_hand.NesterovByHand(0.7, 0.9),
        {"warmup": 3},
    ),
    "overlapped": (
        "diloco",
        {"sync_every": 6, "warmup_steps": 0, "overlap_steps": 2, "local_weight": 0.25},
        ADAM,
        6,
        lambda: by_hand.NesterovByHand(0.7, 0.9),
        {"overlap": 2, "local_weight": 0.25},
    ),
    "SlowMo": ("slowmo", {"sync_every": 3}, SGD, 3, lambda: by_hand.SlowMoByHand(1.0, 0.5, 0.02), {}),
    "elastic averaging": (
        "easgd",
        {"sync_every": 3, "elastic": 0.9},
        SGD,
        3,
        lambda: lambda a, d: [x - 0.9 * y for x, y in zip(a, d, strict=True)],
        {"pull": 0.3},
    ),
}


def against_hand(rank: int, world: int) -> dict[str, float]:
    found = {}
    for case, (name, options, model, every, outer, rule) in CASES.items():
        mine = ours(rank, world, ls.strategy(name, **options), model)
        found[case] = distance(mine, hand(rank, world, model, every, outer(), **rule))
    return found


@pytest.mark.dist
def test_every_form_equals_its_equations_by_hand() -> None:
    for errors in run_ranks(against_hand, 3, init="env", deadline=200):
        assert {name: error < 2e-6 for name, error in errors.items()} == dict.fromkeys(CASES, True), errors


def equivalences(rank: int, world: int) -> dict[str, float]:
    local = ours(rank, world, ls.strategy("local_sgd", sync_every=4), SGD)
    forms = {
        "DiLoCo with outer lr 1, no momentum": ls.strategy(
            "diloco", sync_every=4, warmup_steps=0, outer_optimizer=ls.Nesterov(1.0, 0.0)
        ),
        "SlowMo with alpha 1, momentum 0": ls.strategy("slowmo", sync_every=4, outer_optimizer=ls.SlowMo(1.0, 0.0)),
        "one fragment by pattern": ls.HybridStrategy(sync_every=4, fragments=["*"]),
        "anchor on the host": ls.HybridStrategy(sync_every=4, anchor_device="cpu"),
    }
    found = {name: distance(local, ours(rank, world, form, SGD)) for name, form in forms.items()}
    for case, model in (("SGD", SGD), ("AdamW", ADAM)):
        strict = ours(rank, world, ls.strategy("strict", find_unused_parameters=True), model)
        found[f"every step, {case}"] = distance(strict, ours(rank, world, ls.HybridStrategy(sync_every=1), model))
    alone = ours(rank, world, ls.HybridStrategy(replica=world, sync_every=4), SGD)
    found["one replica"] = distance(ours(rank, world, ls.UnwrappedStrategy(replica=world), SGD), alone)
    return found


@pytest.mark.dist
def test_forms_that_are_the_same_are_equal_and_adamw_averaged_every_step_is_not_strict() -> None:
    for found in run_ranks(equivalences, 3, init="env", deadline=200):
        assert found.pop("every step, AdamW") > 1e-2, "the README says that AdamW differs"
        assert max(found.values()) < 2e-6, found
        assert found["DiLoCo with outer lr 1, no momentum"] == 0.0
