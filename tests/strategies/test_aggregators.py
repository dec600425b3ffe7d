"""Every mode combines gradients or deltas as its aggregator's formula says, written out by hand in plain torch."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from torch import Tensor, nn

import lightning_sync as ls
from tests.aggregators import references
from tests.models import Toy, fit
from tests.strategies import by_hand
from tests.strategies.by_hand import Sharded
from tests.workers import run_ranks

STEPS, RANKS = 10, 4
Reference = Callable[[Tensor, Tensor], Tensor]


def everyone(values: list[Tensor]) -> list[Tensor]:
    """What all ranks hold, in float64: ``[N, *shape]`` per tensor."""
    flat = torch.cat([v.detach().double().reshape(-1) for v in values])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    parts = torch.stack(rows).split([v.numel() for v in values], dim=1)
    return [p.view(-1, *v.shape) for p, v in zip(parts, values, strict=True)]


def combined(values: list[Tensor], reference: Reference, ranks: list[int] | None = None) -> list[Tensor]:
    """The reference over these ranks' values (all by default), which count alike."""
    rows = [r if ranks is None else r[ranks] for r in everyone(values)]
    shares = torch.full((len(rows[0]),), 1 / len(rows[0]), dtype=torch.float64)
    return [reference(r.flatten(1), shares).view(r.shape[1:]) for r in rows]


class ByHand:
    """Gradients and deltas combined by references.

    Args:
        every: Steps between two exchanges of deltas; 0: gradients are combined in every step.
        delay: Steps by which gradients are late.
        warmup: Steps in which gradients are combined, before deltas are.
        replica: Consecutive ranks that average their gradients in every step.
    """

    def __init__(self, reference: Reference, every: int = 0, delay: int = 0, warmup: int = 0, replica: int = 1) -> None:
        self.reference, self.every, self.delay, self.warmup, self.replica = reference, every, delay, warmup, replica
        self.anchor: list[Tensor] = []
        self.late: list[list[Tensor]] = []

    def gradients(self, step: int, params: list[nn.Parameter]) -> bool:
        mine = [p.grad for p in params if p.grad is not None]
        assert len(mine) == len(params)
        if not self.every or step <= self.warmup:
            self.late.append(combined(mine, self.reference))
        elif self.replica > 1:
            first = dist.get_rank() // self.replica * self.replica
            self.late.append(combined(mine, references.mean, list(range(first, first + self.replica))))
        else:
            return True
        if len(self.late) <= self.delay:
            return False
        for p, g in zip(params, self.late.pop(0), strict=True):
            p.grad = g.to(p.dtype)
        return True

    @torch.no_grad()
    def after(self, step: int, params: list[nn.Parameter]) -> None:
        if step <= self.warmup:
            self.anchor = [p.detach().clone().double() for p in params]
        if not self.every or step <= self.warmup or ((step - self.warmup) % self.every and step != STEPS):
            return
        leaders = list(range(0, dist.get_world_size(), self.replica))
        deltas = [a - p for a, p in zip(self.anchor, params, strict=True)]
        for a, p, d in zip(self.anchor, params, combined(deltas, self.reference, leaders), strict=True):
            a -= d
            p.copy_(a)


CASES: dict[str, tuple[Callable[[], Any], Reference, dict[str, Any], dict[str, Any]]] = {
    "strict, median": (lambda: ls.strategy("strict", aggregator="median"), references.median, {}, {}),
    "strict, trimmed mean": (
        lambda: ls.strategy("strict", aggregator=ls.TrimmedMean(0.3)),
        references.trimmed_mean(0.3),  # type: ignore[dict-item]
        {},
        {},
    ),
    "strict, Adasum": (lambda: ls.strategy("strict", aggregator="adasum"), references.adasum, {}, {}),
    "strict, sum": (lambda: ls.strategy("strict", aggregator="sum"), references.total, {}, {"lr": 0.01}),
    "strict, vote": (
        lambda: ls.strategy("strict", aggregator="majority_vote"),
        references.majority_vote,
        {},
        {"lr": 1e-3},
    ),
    "delayed, median": (lambda: ls.strategy("delayed", aggregator="median"), references.median, {"delay": 1}, {}),
    "hybrid every step, Adasum": (
        lambda: ls.HybridStrategy(sync_every=1, aggregator="adasum"),
        references.adasum,
        {"every": 1},
        {},
    ),
    "hybrid every step, Adasum, AdamW": (
        lambda: ls.HybridStrategy(sync_every=1, aggregator="adasum"),
        references.adasum,
        {"every": 1},
        {"adam": True, "lr": 1e-3},
    ),
    "hybrid, median, after a warm-up": (
        lambda: ls.HybridStrategy(sync_every=3, warmup_steps=3, aggregator="median"),
        references.median,
        {"every": 3, "warmup": 3},
        {},
    ),
    "hybrid, replicas of two ranks, Adasum": (
        lambda: ls.HybridStrategy(sync_every=3, replica=2, aggregator="adasum"),
        references.adasum,
        {"every": 3, "replica": 2},
        {},
    ),
}


def against_hand(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        found |= against_hand_in(case, rank, world)
    return found


class TwoLevels(callbacks.Callback):
    """Notes whether deltas are reduced on two levels."""

    used = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.used = trainer.strategy._reducer is not None and trainer.strategy._reducer.wires.intra is not None


def against_hand_in(case: str, rank: int, world: int, **options: Any) -> dict[str, Any]:
    """How far the parameters of a case are from those by hand, and from those by hand with the mean instead."""
    strategy, reference, rule, model = CASES[case]

    def fresh() -> Sharded:
        torch.manual_seed(3)
        return Sharded(rank, world, **{"lr": 0.02, **model})

    module, levels = fresh(), TwoLevels()
    settings = {
        "devices": world,
        "max_steps": STEPS,
        "use_distributed_sampler": False,
        "callbacks": [levels],
        **options,
    }
    fit(module, strategy(), world, **settings)
    ours = {n: p.detach().clone() for n, p in module.named_parameters()}
    found: dict[str, Any] = {"two levels": levels.used}
    for name, formula in ((case, reference), (f"{case}: mean", references.mean)):
        module, hand = fresh(), ByHand(formula, **rule)
        hand.anchor = [p.detach().clone().double() for p in by_hand.trained(module)]
        theirs = by_hand.train(module, STEPS, hand.after, hand.gradients)
        found[name] = max(float((ours[n].double() - theirs[n].double()).abs().max()) for n in ours)
    return found


@pytest.fixture(scope="module")
def distances() -> list[dict[str, Any]]:
    return run_ranks(against_hand, RANKS, init="env", deadline=170)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_every_mode_combines_as_the_formula_says(distances: list[dict[str, Any]], case: str) -> None:
    assert max(rank[case] for rank in distances) < 1e-5
    assert min(rank[f"{case}: mean"] for rank in distances) > 1e-4


def on_two_nodes(rank: int, world: int) -> dict[str, Any]:
    """Four processes that believe to be on two hosts, each of which is a replica."""
    os.environ.update(GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return against_hand_in("hybrid, replicas of two ranks, Adasum", rank, world, devices=2, num_nodes=2)


@pytest.mark.dist
def test_between_nodes_that_are_replicas_deltas_are_combined_on_two_levels() -> None:
    for found in run_ranks(on_two_nodes, RANKS, init="env", deadline=100):
        assert found["two levels"]
        assert found["hybrid, replicas of two ranks, Adasum"] < 1e-5


def compressed(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("median", "trimmed_mean", "adasum", "majority_vote"):
        torch.manual_seed(0)
        module = Toy(lr=1e-3)
        fit(module, ls.StrictStrategy(compressor="int8", aggregator=name, bucket_cap_mb=0.01), world, max_steps=6)
        found[name] = [p.detach().clone() for p in module.parameters()]
    found["refused"] = []
    for strategy in (
        ls.StrictStrategy(aggregator="median", two_level=True),
        ls.HybridStrategy(aggregator="adasum", two_level=True, replica="rank"),
    ):
        with pytest.raises(ValueError, match="two_level=True") as error:
            fit(Toy(), strategy, world, max_steps=1)
        found["refused"].append(str(error.value))
    return found


@pytest.fixture(scope="module")
def over_int8() -> list[dict[str, Any]]:
    return run_ranks(compressed, 3, init="env", deadline=120)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["median", "trimmed_mean", "adasum", "majority_vote"])
def test_over_int8_ranks_stay_equal_bit_for_bit(over_int8: list[dict[str, Any]], name: str) -> None:
    first, *others = (rank[name] for rank in over_int8)
    assert all(bool(p.isfinite().all()) for p in first)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.dist
def test_two_levels_are_refused_where_they_would_add_up_what_the_aggregator_has_to_see(
    over_int8: list[dict[str, Any]],
) -> None:
    for rank in over_int8:
        assert len(rank["refused"]) == 2
        for text in rank["refused"]:
            assert "adds up what the ranks of a node send before the aggregator sees it" in text


def test_elastic_averaging_is_refused_with_another_aggregator() -> None:
    with pytest.raises(ValueError, match=r"HybridStrategy\(elastic=0\.9\).*another aggregator than the mean"):
        ls.strategy("easgd", aggregator="median")
