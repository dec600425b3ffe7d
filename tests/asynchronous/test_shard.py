from __future__ import annotations

import io
import random
from collections import deque

import pytest
import torch
from torch import Tensor

from lightning_sync.asynchronous.ledger import Ledger, SequenceGapError
from lightning_sync.asynchronous.optimizer import ShardOptimizer, check_elementwise, like
from lightning_sync.asynchronous.rules import Add, Contribution, DelayCompensated, DelayedNesterov, Quorum, Rule
from lightning_sync.asynchronous.shard import Shard


def contribution(sender: int, sequence: int, values: Tensor, read: int = 0, clock: int | None = None) -> Contribution:
    return Contribution(sender, sequence, values, read, sequence if clock is None else clock)


def test_a_version_is_made_by_every_change_and_staleness_is_counted_in_versions() -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2)
    one = torch.ones(2)
    first = shard.apply(contribution(0, 0, one))
    assert (first.taken, first.version, first.staleness) == (True, 1, 0)
    receipt = shard.apply(contribution(1, 0, one))
    assert (receipt.taken, receipt.version, receipt.staleness) == (True, 2, 1)
    receipt = shard.apply(contribution(1, 1, one, read=2))
    assert (receipt.version, receipt.staleness) == (3, 0)
    assert shard.contains == {0: 1, 1: 2}
    s = shard.ledger.staleness()
    assert (s.mean, s.p95, s.largest, s.histogram) == (1 / 3, 1, 1, {0: 2, 1: 1})


def test_a_repetition_changes_nothing_and_is_counted() -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2)
    for sequence in (0, 1):
        shard.apply(contribution(0, sequence, torch.ones(2)))
    before = shard.values.clone()
    for sequence in (0, 1, 0):
        receipt = shard.apply(contribution(0, sequence, torch.full((2,), 7.0)))
        assert not receipt.taken
        assert receipt.version == 2
    assert torch.equal(shard.values, before)
    assert (shard.ledger.taken, shard.ledger.repeated) == (2, 3)


def test_a_missing_predecessor_is_an_error_and_changes_nothing() -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2)
    with pytest.raises(SequenceGapError, match="sent contribution 1, but 0 has not arrived"):
        shard.apply(contribution(0, 1, torch.ones(2)))
    assert shard.version == 0
    assert shard.ledger.expected(0) == 0


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (lambda: contribution(2, 0, torch.ones(2)), "replica=2: expected an integer from 0 to 1"),
        (lambda: contribution(0, 0, torch.ones(3)), r"sent \(3,\) values"),
        (lambda: contribution(0, 0, torch.ones(2, dtype=torch.float64)), "torch.float64"),
        (lambda: contribution(0, 0, torch.ones(2), read=1), "computed on version 1; the shard is at 0"),
        (lambda: contribution(0, 0, torch.ones(2), read=-1), "version -1"),
    ],
)
def test_what_cannot_belong_to_the_shard_is_refused_and_changes_nothing(bad: object, named: str) -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2)
    with pytest.raises(ValueError, match=named):
        shard.apply(bad())  # type: ignore[operator]
    assert shard.version == 0
    assert shard.ledger.expected(0) == 0


def test_a_read_is_a_copy_with_what_it_contains_and_no_copy_where_nothing_is_new() -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2)
    first = shard.read(0)
    shard.apply(contribution(1, 0, torch.ones(2), clock=5))
    assert first.values is not None
    assert torch.equal(first.values, torch.zeros(2))
    second = shard.read(0, since=0)
    assert (second.version, second.contains, second.sequences) == (1, {1: 6}, {1: 1})
    again = shard.read(0, since=1)
    assert again.values is None
    assert again.contains == {1: 6}


def test_a_read_gives_the_difference_from_what_the_reader_has() -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2, keep_reads=True)
    shard.read(0)
    shard.apply(contribution(1, 0, torch.tensor([1.0, 2.0])))
    read = shard.read(0, since=0, difference=True)
    assert read.difference is not None
    assert torch.equal(read.difference, torch.tensor([-1.0, -2.0]))
    with pytest.raises(ValueError, match="keep_reads"):
        Shard(torch.zeros(2), Add(), replicas=2).read(0, difference=True)


def test_what_a_rule_holds_back_is_not_said_to_be_contained() -> None:
    shard = Shard(torch.zeros(2), Quorum(quorum=2, grace=0.0), replicas=2)
    shard.apply(contribution(0, 0, torch.ones(2)))
    assert shard.read(1).sequences == {}
    shard.apply(contribution(1, 0, torch.ones(2)))
    assert shard.read(1).sequences == {0: 1, 1: 1}


def test_compensation_says_which_read_it_misses() -> None:
    shard = Shard(torch.zeros(2), DelayCompensated(), replicas=2)
    with pytest.raises(ValueError, match="version 0, which it has not read"):
        shard.apply(contribution(0, 0, torch.ones(2)))
    assert (shard.version, shard.ledger.taken) == (0, 0)


def test_old_reads_are_forgotten_once_a_later_one_was_used() -> None:
    shard = Shard(torch.zeros(2), DelayCompensated(), replicas=2)
    for k in range(50):
        read = shard.read(0)
        shard.apply(contribution(0, k, torch.ones(2), read=read.version))
        assert len(shard.state()["reads"][0]) <= 1
    shard.retire(0)
    assert 0 not in shard.state()["reads"]


def test_a_returning_replica_is_told_its_next_number() -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2)
    shard.apply(contribution(1, 0, torch.ones(2)))
    shard.retire(1)
    assert shard.rejoin(1) == 1
    assert shard.rejoin(0) == 0


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_applied_twice_whatever_is_delayed_or_repeated(seed: int) -> None:
    """Channels keep a sender's order and may repeat; integers, so that the sums are exact in any order."""
    rng, replicas, rules = random.Random(seed), 4, [Add(), Quorum(quorum=2, grace=0.3)]
    shard = Shard(torch.zeros(5), rules[seed % 2], replicas=replicas)
    channels: list[deque[Contribution]] = [deque() for _ in range(replicas)]
    total, sent, now = torch.zeros(5), [0] * replicas, 0.0
    versions = [0] * replicas
    while sum(sent) < 200 or any(channels):
        now += rng.expovariate(1.0)
        r = rng.randrange(replicas)
        if sum(sent) < 200 and rng.random() < 0.5:
            values = torch.tensor([float(rng.randint(-9, 9)) for _ in range(5)])
            channels[r].append(Contribution(r, sent[r], values, versions[r], sent[r], samples=1.0))
            sent[r] += 1
            total += values
        elif channels[r]:
            arrived = channels[r][0]
            if rng.random() < 0.7:
                channels[r].popleft()  # else it stays, and arrives once more
            before = shard.contains.get(r, 0)
            shard.apply(arrived, now)
            assert shard.contains.get(r, 0) >= before  # never reordered
        if rng.random() < 0.3:
            read = shard.read(r)
            versions[r] = read.version
            assert all(read.sequences[s] <= sent[s] for s in read.sequences)
    assert shard.ledger.taken == 200
    assert [shard.ledger.expected(r) for r in range(replicas)] == sent
    if seed % 2 == 0:
        assert torch.equal(shard.values, -total)
        assert shard.version == 200
        assert shard.contains == dict(enumerate(sent))


def test_a_quorum_merges_every_delta_exactly_once() -> None:
    rng = random.Random(3)
    # Every replica alone in its own coordinate: what the shard moved by, times the weights, is what was sent.
    replicas, shard = 3, Shard(torch.zeros(3, dtype=torch.float64), Quorum(1, 0.0, "equal"), replicas=3)
    sent = torch.zeros(3, dtype=torch.float64)
    sequence = [0] * replicas
    for k in range(300):
        r = rng.randrange(replicas)
        values = torch.zeros(3, dtype=torch.float64)
        values[r] = rng.uniform(-1, 1)
        shard.apply(Contribution(r, sequence[r], values, shard.version, sequence[r]), float(k))
        sequence[r] += 1
        sent += values
    torch.testing.assert_close(shard.values, -sent)
    assert shard.version == 300


@pytest.mark.parametrize("rule", [Add(), DelayCompensated(), DelayedNesterov(period=3), Quorum(quorum=2, grace=0.4)])
def test_a_shard_goes_on_from_its_saved_state_bit_for_bit(rule: Rule) -> None:
    def factory(values: Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD([values], lr=0.3, momentum=0.9, nesterov=True)

    def drive(shard: Shard, start: int, stop: int) -> None:
        generator = torch.Generator().manual_seed(start)
        for k in range(start, stop):
            sender = (k * 7) % 3
            read = shard.read(sender)
            values = torch.randn(6, generator=generator)
            shard.apply(
                Contribution(sender, shard.ledger.expected(sender), values, read.version, k, 0.3, 5.0, 2), float(k)
            )
            shard.tick(k + 0.5)

    def fresh() -> Shard:
        return Shard(torch.linspace(0, 1, 6), rule, replicas=3, optimizer=factory)

    whole = fresh()
    drive(whole, 0, 10)
    stream = io.BytesIO()
    torch.save(whole.state(), stream)
    resumed = fresh()
    stream.seek(0)
    resumed.load_state(torch.load(stream, weights_only=True))
    drive(whole, 10, 25)
    drive(resumed, 10, 25)
    assert torch.equal(whole.values, resumed.values)
    assert (whole.version, whole.contains) == (resumed.version, resumed.contains)
    assert whole.ledger.state() == resumed.ledger.state()


def test_state_of_another_shape_is_refused() -> None:
    shard = Shard(torch.zeros(2), Add(), replicas=2)
    with pytest.raises(ValueError, match="the state has 2 values and no optimiser, the shard 3 and no"):
        Shard(torch.zeros(3), Add(), replicas=2).load_state(shard.state())
    with pytest.raises(ValueError, match="the shard 2 and one"):
        Shard(torch.zeros(2), Add(), replicas=2, optimizer=lambda v: torch.optim.SGD([v], lr=1.0)).load_state(
            shard.state()
        )


@pytest.mark.parametrize(
    ("values", "push", "named"),
    [
        (torch.zeros(2, 2), "delta", "one dimension"),
        (torch.zeros(2, dtype=torch.int64), "delta", "floating-point"),
        (torch.zeros(2, requires_grad=True), "delta", "detached"),
        (torch.zeros(2), "weights", "push='weights'"),
        (torch.zeros(2), "gradient", "optimizer=None"),
    ],
)
def test_a_shard_that_cannot_work_is_refused_at_construction(values: Tensor, push: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Shard(values, Add(), replicas=2, push=push)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_shards_with_the_modules_optimiser_step_like_the_module(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.03, "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=0.01)  # type: ignore[call-arg]
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    # Parameters in order 12, 4, 8, 2 elements, groups 0, 1, 0, 1; cut in the middle of the first weight.
    plans = [(0, 10, [(0, 10, 0)]), (10, 26, [(0, 2, 0), (2, 6, 1), (6, 14, 0), (14, 16, 1)])]
    shards = [
        Shard(flat[a:b].clone(), Add(), replicas=1, push="gradient", optimizer=like(optimizer, plan))
        for a, b, plan in plans
    ]
    for k in range(5):
        gradient = torch.randn(26, generator=torch.Generator().manual_seed(k))
        offset = 0
        for p in model.parameters():
            p.grad = gradient[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        optimizer.step()
        for (a, b, _), shard in zip(plans, shards, strict=True):
            shard.apply(Contribution(0, k, gradient[a:b].clone(), shard.version, k))
    whole = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(torch.cat([s.values for s in shards]), whole, rtol=1e-6, atol=1e-7)


def test_an_optimiser_that_looks_across_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS cannot run on a shard"):
        check_elementwise(torch.optim.LBFGS([torch.zeros(2)]))


@pytest.mark.parametrize(
    "factory",
    [
        lambda v: torch.optim.SGD([v[:2]], lr=1.0),
        lambda v: torch.optim.SGD([v[:3], v[2:]], lr=1.0),
        lambda v: torch.optim.SGD([v.clone()], lr=1.0),
        lambda v: torch.optim.SGD([v[:2], v[3:]], lr=1.0),
    ],
)
def test_an_optimiser_must_cover_the_shard_once(factory: object) -> None:
    with pytest.raises(ValueError, match="cover the shard's 4 values once"):
        ShardOptimizer(torch.zeros(4), factory)  # type: ignore[arg-type]


def test_the_ledger_bins_rare_stalenesses_together_and_keeps_the_largest() -> None:
    ledger = Ledger()
    for k, staleness in enumerate([0] * 96 + [3, 3, 3, 5000]):
        assert ledger.admit(0, k)
        ledger.take(0, staleness)
    s = ledger.staleness()
    assert (s.p95, s.largest) == (0, 5000)
    assert s.histogram == {0: 96, 3: 3, 1023: 1}
    assert s.mean == pytest.approx(50.09)
    assert Ledger().staleness().mean == 0.0
