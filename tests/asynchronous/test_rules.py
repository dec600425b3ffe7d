from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from torch import Tensor

from lightning_sync.asynchronous.rules import (
    RULES,
    Add,
    Contribution,
    DelayCompensated,
    DelayedNesterov,
    Elastic,
    Facts,
    InverseStaleness,
    Quorum,
    Rule,
)
from lightning_sync.asynchronous.shard import Shard
from tests.asynchronous import references

N = 7


def deltas(seed: int, count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(N, generator=generator, dtype=torch.float64)


def give(shard: Shard, sender: int, delta: Tensor, read: int | None = None, now: float = 0.0, **more: float) -> int:
    """One contribution in order; the version afterwards."""
    number = shard.ledger.expected(sender)
    version = shard.version if read is None else read
    c = Contribution(sender, number, delta, version, number, **more)  # type: ignore[arg-type]
    return shard.apply(c, now).version


def start(rule: Rule, **more: object) -> tuple[Shard, list[float]]:
    values = next(deltas(99, 1))
    return Shard(values, rule, replicas=4, **more), values.tolist()  # type: ignore[arg-type]


def close(shard: Shard, expected: list[float]) -> None:
    torch.testing.assert_close(shard.values, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_add_subtracts_every_contribution_times_its_weight(seed: int) -> None:
    shard, x = start(Add())
    for k, d in enumerate(deltas(seed, 20)):
        give(shard, k % 4, d, read=max(0, shard.version - k % 3), weight=0.25)
        x = references.add(x, d.tolist(), 0.25)
    close(shard, x)


@pytest.mark.parametrize("seed", range(3))
def test_inverse_staleness_divides_by_the_versions_made_since_the_read(seed: int) -> None:
    shard, x = start(InverseStaleness())
    for k, d in enumerate(deltas(seed, 20)):
        tau = min(k % 5, shard.version)
        give(shard, k % 4, d, read=shard.version - tau)
        x = references.inverse_staleness(x, d.tolist(), 1.0, tau)
    close(shard, x)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_delay_compensation_equals_the_papers_equation(seed: int, adaptive: bool) -> None:
    rule = DelayCompensated(lam=0.3, adaptive=adaptive, decay=0.9)
    shard, x = start(rule, push="gradient", optimizer=lambda v: torch.optim.SGD([v], lr=0.1))
    reference = references.DelayCompensated(N, 0.3, adaptive, 0.9)
    reads = {r: (shard.read(r).version, shard.values.tolist()) for r in range(4)}
    for k, d in enumerate(deltas(seed, 20)):
        sender = (k * k) % 4  # uneven: staleness differs
        version, read = reads[sender]
        give(shard, sender, d, read=version)
        x = reference.step(x, d.tolist(), read, 0.1)
        again = shard.read(sender)
        assert again.values is not None
        reads[sender] = (again.version, again.values.tolist())
    close(shard, x)


def test_adaptive_compensation_of_sgds_deltas_equals_that_of_its_gradients() -> None:
    eta, x = 0.05, next(deltas(5, 1))
    by_gradient = Shard(
        x.clone(),
        DelayCompensated(),
        replicas=2,
        push="gradient",
        optimizer=lambda v: torch.optim.SGD([v], lr=eta),
    )
    by_delta = Shard(x.clone(), DelayCompensated(), replicas=2)
    for shard, factor in ((by_gradient, 1.0), (by_delta, eta)):
        shard.read(0), shard.read(1)
        for d in deltas(6, 3):
            give(shard, 0, d * factor)
            shard.read(0)
        give(shard, 1, next(deltas(7, 1)) * factor, read=0)
    torch.testing.assert_close(by_delta.values, by_gradient.values, rtol=1e-4, atol=1e-5)  # 1e-7 under the root


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_delayed_nesterov_equals_the_papers_algorithm(seed: int, activation: float) -> None:
    shard, x = start(DelayedNesterov(lr=0.7, momentum=0.9, period=4, activation=activation))
    reference = references.DelayedNesterov(N, 0.7, 0.9, 4, activation)
    for k, d in enumerate(deltas(seed, 22)):
        give(shard, k % 4, d, weight=0.25)
        x = reference.step(x, d.tolist())
    close(shard, x)


def test_a_synchronous_round_of_delayed_nesterov_is_one_step_of_diloco() -> None:
    shard, x = start(DelayedNesterov(lr=0.7, momentum=0.9, period=4))
    m, given = [0.0] * N, list(deltas(3, 12))
    for round_start in range(0, 12, 4):
        for sender, d in enumerate(given[round_start : round_start + 4]):
            give(shard, sender, d, weight=0.25)
        mean = torch.stack(given[round_start : round_start + 4]).mean(0).tolist()
        x, m = references.nesterov(x, m, mean, 0.7, 0.9)
    close(shard, x)


def test_an_open_period_of_delayed_nesterov_is_the_number_of_replicas() -> None:
    (left_open, _), (given, _) = start(DelayedNesterov()), start(DelayedNesterov(period=4))
    for k, d in enumerate(deltas(3, 9)):
        give(left_open, k % 4, d)
        give(given, k % 4, d)
    assert torch.equal(left_open.values, given.values)


def test_elastic_averaging_moves_centre_and_replica_alike() -> None:
    rule = Elastic(alpha=0.2)
    shard, centre = start(rule)
    locals_ = [d.tolist() for d in deltas(4, 3)]
    for k in range(12):
        i = (k * 2) % 3
        read = shard.read(i).values
        assert read is not None
        local = torch.tensor(locals_[i], dtype=torch.float64)
        delta = read - local
        give(shard, i, delta, weight=17.0)  # does not count
        moved = rule.next_local(local, delta, read)
        centre, locals_[i] = references.elastic(centre, locals_[i], 0.2)
        torch.testing.assert_close(moved, torch.tensor(locals_[i], dtype=torch.float64))
        locals_[i] = moved.tolist()
    close(shard, centre)


@pytest.mark.parametrize("weigh_by", ["samples", "samples_and_rate", "equal"])
def test_a_quorum_averages_what_each_replica_sent_by_its_weight(weigh_by: str) -> None:
    shard, x = start(Quorum(quorum=3, grace=0.0, weigh_by=weigh_by))
    d = [t.tolist() for t in deltas(8, 4)]
    assert give(shard, 0, torch.tensor(d[0]).double(), samples=10, steps=5) == 0
    assert give(shard, 1, torch.tensor(d[1]).double(), samples=40, steps=5) == 0
    assert give(shard, 0, torch.tensor(d[2]).double(), samples=20, steps=10) == 0  # the same replica once more
    assert shard.contains == {}
    assert give(shard, 3, torch.tensor(d[3]).double(), samples=6, steps=3) == 1
    assert shard.contains == {0: 2, 1: 1, 3: 1}
    w = {"samples": [30, 40, 6], "samples_and_rate": [30 * 30 / 15, 40 * 40 / 5, 6 * 6 / 3], "equal": [1, 1, 1]}[
        weigh_by
    ]
    own = [
        [a + b for a, b in zip(torch.tensor(d[0]).double().tolist(), torch.tensor(d[2]).double().tolist(), strict=True)]
    ]
    own += [torch.tensor(d[1]).double().tolist(), torch.tensor(d[3]).double().tolist()]
    merged = [sum(wi * oi[k] for wi, oi in zip(w, own, strict=True)) / sum(w) for k in range(N)]
    close(shard, references.add(x, merged, 1.0))


def test_a_quorum_with_an_outer_optimiser_is_diloco_when_all_deliver() -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    shard, x = start(Quorum(quorum=4, grace=0.0), optimizer=lambda v: sgd([v]))
    m = [0.0] * N
    given = list(deltas(3, 12))
    for k, d in enumerate(given):
        give(shard, k % 4, d)
        if k % 4 == 3:
            x, m = references.nesterov(x, m, torch.stack(given[k - 3 : k + 1]).mean(0).tolist(), 0.7, 0.9)
    close(shard, x)
    assert shard.version == 3


def deliver_regularly(shard: Shard, senders: dict[int, float], until: float) -> float:
    """Everyone delivers every `senders[s]` seconds; the time of the last delivery."""
    times = sorted((k * gap, s) for s, gap in senders.items() for k in range(1, int(until / gap) + 1))
    for now, sender in times:
        shard.tick(now)
        give(shard, sender, torch.ones(N, dtype=torch.float64), now=now)
    return times[-1][0]


def test_the_grace_window_waits_for_who_usually_comes_within_it() -> None:
    shard, _ = start(Quorum(quorum=1, grace=0.5))
    for k in range(40):
        for sender, offset in ((0, 0.0), (1, 2.0)):
            due = shard.due()
            if due is not None and due <= 10 * k + offset:
                shard.tick(due)
            give(shard, sender, torch.ones(N, dtype=torch.float64), now=10 * k + offset)
    before = shard.version
    assert shard.due() is None  # both are in: the step was taken when the second came
    give(shard, 0, torch.ones(N, dtype=torch.float64), now=400.0)
    assert shard.version == before
    due = shard.due()
    assert due is not None
    assert 402.0 <= due <= 405.0
    assert shard.tick(due - 0.01) == before
    assert shard.tick(due) == before + 1  # the other did not come this time


def test_the_grace_window_waits_for_nobody_who_usually_comes_later() -> None:
    shard, _ = start(Quorum(quorum=1, grace=0.2))
    deliver_regularly(shard, {0: 10.0, 1: 10.0, 3: 97.0}, 400.0)
    shard.tick(1000.0)
    before = shard.version
    give(shard, 0, torch.ones(N, dtype=torch.float64), now=1010.0)
    give(shard, 1, torch.ones(N, dtype=torch.float64), now=1010.0)
    assert shard.version > before


@pytest.mark.parametrize("origin", [0.0, 1e6])
def test_the_owners_clock_may_start_anywhere_and_anew(origin: float) -> None:
    shard, _ = start(Quorum(quorum=1, grace=0.5))
    shard.begin(origin)
    for replica in (0, 1):
        give(shard, replica, torch.ones(N, dtype=torch.float64), now=origin + 10.0)
    due = shard.due()  # two have not been heard of: a usual gap has passed, they may come any moment
    assert due == pytest.approx(origin + 15.0)
    assert shard.tick(origin + 14.9) == 0
    assert shard.tick(origin + 15.1) == 1
    resumed, _ = start(Quorum(quorum=1, grace=0.5))
    resumed.load_state(shard.state())
    resumed.begin(500.0)  # 15.1 s of training are over
    give(resumed, 0, torch.ones(N, dtype=torch.float64), now=505.0)
    due = resumed.due()  # the other is known, and expected about now
    assert due is not None
    assert 505.0 < due <= 510.1


def test_a_replica_that_was_away_is_not_waited_for_by_the_time_it_was_away() -> None:
    shard, _ = start(Quorum(quorum=1, grace=0.5))
    shard.begin(0.0)
    for replica in (2, 3):
        shard.retire(replica)
    for k in range(1, 10):
        for replica in (0, 1):
            give(shard, replica, torch.ones(N, dtype=torch.float64), now=10.0 * k)
    shard.retire(1)
    give(shard, 0, torch.ones(N, dtype=torch.float64), now=100.0)
    assert shard.due() is None  # nobody else is alive: the step was taken
    shard.rejoin(1)
    give(shard, 0, torch.ones(N, dtype=torch.float64), now=110.0)
    assert shard.due() is None  # nobody knows when it will deliver
    give(shard, 1, torch.ones(N, dtype=torch.float64), now=1000.0)
    give(shard, 0, torch.ones(N, dtype=torch.float64), now=1001.0)
    shard.tick(1006.0)
    version = shard.version
    give(shard, 0, torch.ones(N, dtype=torch.float64), now=1009.0)
    assert shard.version == version  # now it is known again, and expected at 1010
    due = shard.due()
    assert due is not None
    assert 1010.0 <= due <= 1015.0


def test_a_quorum_is_complete_when_those_it_waits_for_are_dead() -> None:
    shard, _ = start(Quorum(quorum=3, grace=0.0))
    for replica in (0, 1):
        assert give(shard, replica, torch.ones(N, dtype=torch.float64), now=1.0) == 0
    shard.retire(2)
    assert shard.tick(2.0) == 0
    shard.retire(3)
    assert shard.tick(3.0) == 1
    assert shard.contains == {0: 1, 1: 1}


@pytest.mark.parametrize("name", list(RULES.__iter__()))
def test_rules_have_names_and_are_frozen(name: str) -> None:
    rule = Elastic(0.5) if name == "elastic" else RULES.build(name)
    assert RULES.name(rule) == name
    field = next(iter(rule.__dataclass_fields__), None)  # type: ignore[attr-defined]
    if field is not None:
        with pytest.raises(FrozenInstanceError):
            setattr(rule, field, 1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DelayCompensated(lam=-1.0), "lam=-1.0"),
        (lambda: DelayCompensated(decay=1.0), "decay=1.0"),
        (lambda: DelayCompensated(adaptive=1), "adaptive=1"),  # type: ignore[arg-type]
        (lambda: Elastic(alpha=1.0), "alpha=1.0"),
        (lambda: Elastic(alpha=True), "alpha=True"),
        (lambda: DelayedNesterov(lr=0.0), "lr=0.0"),
        (lambda: DelayedNesterov(momentum=1.0), "momentum=1.0"),
        (lambda: DelayedNesterov(period=0), "period=0"),
        (lambda: DelayedNesterov(period=4, activation=0.3), "activation=0.3"),
        (lambda: Quorum(quorum=0), "quorum=0"),
        (lambda: Quorum(grace=-0.1), "grace=-0.1"),
        (lambda: Quorum(grace=float("nan")), "grace=nan"),
        (lambda: Quorum(weigh_by="tokens"), "weigh_by='tokens'"),
    ],
)
def test_a_bad_constant_is_named_at_construction(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("rule", [Elastic(0.1), DelayedNesterov(), Quorum()])
def test_a_rule_for_deltas_refuses_gradients(rule: Rule) -> None:
    with pytest.raises(ValueError, match="defined for delta, not for push='gradient'"):
        Shard(torch.zeros(3), rule, replicas=2, push="gradient", optimizer=lambda v: torch.optim.SGD([v], lr=0.1))


@dataclass(frozen=True)
class SignOnly(Rule):
    """A third party's rule, in one class."""

    step: float = 0.1

    def change(self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]) -> Tensor:
        return contribution.values.sign() * self.step


def test_a_third_party_adds_a_rule_in_one_class() -> None:
    shard = Shard(torch.zeros(3), RULES.build(SignOnly()), replicas=2)
    shard.apply(Contribution(0, 0, torch.tensor([2.0, -3.0, 0.0]), 0, 0))
    torch.testing.assert_close(shard.values, torch.tensor([-0.1, 0.1, 0.0]))
