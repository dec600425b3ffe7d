"""The simulated world: what it claims about time, and what the modes do in it."""

from __future__ import annotations

import io
from dataclasses import replace
from math import inf

import pytest
import torch
from rich.console import Console

from lightning_sync import cli
from lightning_sync.asynchronous import modes, simulate
from lightning_sync.asynchronous.cluster import Cluster, Draws
from lightning_sync.asynchronous.modes import Mode
from lightning_sync.asynchronous.problems import Logistic, Problem, Quadratic
from lightning_sync.asynchronous.rules import (
    Add,
    DelayCompensated,
    DelayedNesterov,
    Elastic,
    InverseStaleness,
    Quorum,
)
from lightning_sync.asynchronous.world import Outcome, Started, World

STALLS = Cluster(replicas=4, stall_share=0.05, stall_factor=12.0)


def finish_times(cluster: Cluster, seed: int, bound: int | None, count: int) -> list[list[float]]:
    """When each replica finishes its updates, from the definition: update c starts once all have finished c - s - 1."""
    draws = Draws(cluster, seed)
    finished: list[list[float]] = []
    for c in range(count):
        ready = finished[c - 1] if c else [0.0] * cluster.replicas
        if bound is not None and c - bound - 1 >= 0:
            ready = [max(r, *finished[c - bound - 1]) for r in ready]
        finished.append([start + draws.step(r) for r, start in enumerate(ready)])
    return finished


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("bound", [0, 1, 4, None])
def test_times_are_those_of_the_definition_of_the_bound(bound: int | None, seed: int) -> None:
    cluster = Cluster(replicas=4, jitter=0.1, stall_share=0.05, speeds=(1.0, 1.0, 1.2, 1.0))
    started: dict[tuple[int, int], float] = {}

    def watch(s: Started) -> None:
        started[s.replica, s.clock] = s.seconds

    World(cluster, Mode("any", max_staleness=bound), seed=seed, watch=watch).run(steps=600)
    draws = Draws(cluster, seed)
    expected = finish_times(cluster, seed, bound, 300)
    for c in range(300):
        for r in range(4):
            seconds = draws.step(r)
            if (r, c) in started:
                assert started[r, c] + seconds == pytest.approx(expected[c][r], rel=1e-12)
    assert len(started) >= 600


def test_a_bound_buys_back_transient_stalls() -> None:
    # 12x stalls in 5 % of the steps of any rank, independently; total steps against strict.
    strict, ssp, free = (
        sum(World(STALLS, m, seed=1).run(seconds=1000).steps)
        for m in (modes.strict(), modes.ssp(4), modes.asynchronous())
    )
    assert ssp / strict >= 1.35
    assert free / strict >= 1.9


def test_the_published_gains_of_a_bound_are_those_of_long_runs_too() -> None:
    # The recursion that the world was shown to follow, ten times longer: no lucky seed.
    totals = {
        bound: sum(t <= 8000 for row in finish_times(STALLS, 7, bound, 6000) for t in row)
        for bound in (0, 1, 4, 16, None)
    }
    for bound, least in ((1, 1.1), (4, 1.35), (16, 1.7), (None, 1.9)):
        assert totals[bound] / totals[0] >= least


def test_a_bound_cannot_help_a_rank_that_is_slow_for_good() -> None:
    cluster = Cluster(replicas=4, speeds=(1.0, 1.0, 1.0, 4.0))
    strict, ssp, free = (
        sum(World(cluster, m).run(seconds=600).steps) for m in (modes.strict(), modes.ssp(4), modes.asynchronous())
    )
    assert ssp - strict <= 3 * 4  # the lead of the other three, once
    assert free / strict > 3.2


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_what_is_read_holds_every_update_the_bound_demands(bound: int) -> None:
    """10,000 steps in all, three shards, slow messages; counted from the copies, not from the clocks."""
    cluster = replace(STALLS, latency=0.3, link_jitter=0.5, jitter=0.2)
    steps = 0

    def watch(s: Started) -> None:
        nonlocal steps
        steps += 1
        for copy in s.contains:
            for replica in range(4):
                assert copy.get(replica, 0) >= s.clock - bound, (s, replica)

    mode = Mode("ssp", max_staleness=bound, blocking=bound != 4)
    outcome = World(cluster, mode, seed=bound, owners=3, watch=watch).run(steps=3400)
    assert steps >= 3400
    assert outcome.largest_lead <= bound + 1


@pytest.mark.parametrize("bound", [0, 2, None])
def test_the_bound_holds_while_replicas_fail_and_return(bound: int | None) -> None:
    cluster = Cluster(replicas=5, jitter=0.3, latency=0.2, link_jitter=0.3, failure_every=60.0, down_seconds=15.0)
    begun: dict[int, set[int]] = {r: set() for r in range(5)}
    exist: dict[int, set[int]] = {r: set() for r in range(5)}
    starts = 0

    def watch(s: Started) -> None:
        nonlocal starts
        starts += 1
        # What it has begun and all its copies contain, it has finished; what died with it they do not contain.
        contained = min(copy.get(s.replica, 0) for copy in s.contains)
        exist[s.replica] |= {c for c in begun[s.replica] if c == contained - 1}
        begun[s.replica].add(s.clock)
        if bound is not None:
            for copy in s.contains:
                for replica, clocks in exist.items():
                    behind = [c for c in clocks if copy.get(replica, 0) <= c < s.clock - bound]
                    assert not behind, (s, replica, behind)

    outcome = World(cluster, Mode("ssp", max_staleness=bound), seed=3, owners=2, watch=watch).run(steps=2000)
    assert starts >= 2000
    assert sum(map(len, exist.values())) > 1500
    assert outcome.lost > 0
    assert min(outcome.steps) > 200


class Integers(Problem):
    """Every step moves by a whole number, so that sums are exact in any order; it remembers what it gave out."""

    def __init__(self) -> None:
        self.given = torch.zeros(6)

    def start(self) -> torch.Tensor:
        return torch.zeros(6)

    def gradient(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        gradient = torch.randint(-5, 6, (6,), generator=generator).float()
        self.given += gradient
        return gradient

    def loss(self, values: torch.Tensor) -> float:
        return 0.0


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_of_every_replica_reaches_every_shard_once(seed: int, blocking: bool) -> None:
    cluster = Cluster(replicas=4, jitter=0.5, latency=0.4, link_jitter=2.0, speeds=(1.0, 1.5, 2.0, 4.0))
    problem = Integers()
    mode = Mode("async", sync_every=1 + seed % 3, weight=1.0, blocking=blocking)
    outcome = World(cluster, mode, seed=seed, owners=3, problem=problem, lr=1.0).run(steps=400)
    assert torch.equal(outcome.values, -problem.given)
    assert outcome.versions >= 400 // (1 + seed % 3)


@pytest.mark.parametrize("mode", [modes.strict(), modes.ssp(3), modes.decoupled(2, 0.5, 4)], ids=lambda m: m.name)
def test_a_run_can_be_replayed_bit_for_bit(mode: Mode) -> None:
    cluster = Cluster(
        replicas=4, jitter=0.2, stall_share=0.05, latency=0.1, link_jitter=0.2, failure_every=80.0, down_seconds=9.0
    )

    def run(seed: int) -> tuple[Outcome, list[Started]]:
        seen: list[Started] = []
        world = World(cluster, mode, seed=seed, owners=2, problem=Quadratic(), watch=seen.append)
        return world.run(steps=400, every=100), seen

    (first, seen), (again, seen_again), (other, _) = run(5), run(5), run(6)
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, other.values)
    assert replace(first, values=None) == replace(again, values=None)  # type: ignore[arg-type]
    assert seen == seen_again


def test_strict_in_the_world_is_plain_sgd_with_the_mean_gradient() -> None:
    problem, lr = Quadratic(size=8), 0.3
    outcome = World(Cluster(replicas=3, jitter=0.3), modes.strict(), seed=4, problem=problem, lr=lr).run(steps=90)
    generators = [torch.Generator().manual_seed(4 * 65_537 + r) for r in range(3)]
    x = problem.start().double()
    for _ in range(30):
        x = x - lr * torch.stack([problem.gradient(x.float(), g) for g in generators]).double().mean(0)
    torch.testing.assert_close(outcome.values, x.float(), rtol=1e-5, atol=1e-5)


def test_momentum_on_the_replicas_in_step_is_momentum_of_the_mean_gradient() -> None:
    problem = Quadratic(size=8)
    outcome = World(Cluster(replicas=3, jitter=0.3), modes.strict(), seed=4, problem=problem, lr=0.1, momentum=0.9).run(
        steps=90
    )
    generators = [torch.Generator().manual_seed(4 * 65_537 + r) for r in range(3)]
    x, v = problem.start().double(), torch.zeros(8).double()
    for _ in range(30):
        v = 0.9 * v + torch.stack([problem.gradient(x.float(), g) for g in generators]).double().mean(0)
        x = x - 0.1 * v
    torch.testing.assert_close(outcome.values, x.float(), rtol=1e-5, atol=1e-5)


def test_one_replica_is_a_plain_worker_in_every_mode_that_adds() -> None:
    problem = Quadratic(size=8)
    generator = torch.Generator().manual_seed(0)
    x = problem.start()
    for _ in range(40):
        x = x - 0.1 * problem.gradient(x, generator)
    for mode in (modes.strict(), modes.ssp(2), modes.asynchronous(4), Mode("overlap", 4, blocking=False)):
        outcome = World(Cluster(replicas=1, latency=0.7), mode, problem=problem, lr=0.1).run(steps=40)
        torch.testing.assert_close(outcome.values, x, rtol=1e-5, atol=1e-6)


def test_decoupled_diloco_keeps_its_goodput_and_its_loss_where_strict_stands_still() -> None:
    replicas, every = 64, 16
    cluster = Cluster(
        replicas=replicas,
        jitter=0.05,
        stall_share=0.005,
        stall_factor=10.0,
        failure_every=1500.0,
        down_seconds=30.0,
        latency=0.05,
    )
    problem, steps = Logistic(), replicas * every * 20
    strict = World(cluster, modes.strict(), seed=1).run(seconds=100)
    assert strict.goodput <= 0.30
    quiet = Cluster(replicas=replicas)
    reference = World(quiet, modes.diloco(replicas, every), seed=1, problem=problem, lr=0.3).run(steps=steps)
    outcome = World(cluster, modes.decoupled(16, 0.5, every), seed=1, problem=problem, lr=0.3).run(steps=steps)
    assert outcome.goodput >= 0.85
    assert outcome.loss <= 1.02 * reference.loss
    assert sum(outcome.waited) / (replicas * outcome.seconds) < 0.01  # only who returns waits, for its values


def test_momentum_at_every_arrival_is_worse_than_diloco_and_delayed_nesterov_closes_most_of_the_gap() -> None:
    # At a learning rate at which synchronous DiLoCo does well; at much smaller ones naive momentum is not worse.
    replicas, every, problem = 8, 8, Quadratic(noise=0.05)
    cluster = Cluster(replicas=replicas, jitter=0.3)

    def loss(mode: Mode) -> float:
        runs = (World(cluster, mode, seed=s, problem=problem, lr=0.05) for s in range(3))
        return sum(w.run(steps=replicas * every * 20).loss for w in runs) / 3

    synchronous = loss(modes.diloco(replicas, every))
    naive = loss(Mode("naive", every, Add(), modes.outer()))
    delayed = loss(Mode("delayed", every, DelayedNesterov(period=replicas)))
    assert naive > 2 * synchronous
    assert (naive - delayed) / (naive - synchronous) >= 0.8


def sgd(lr: float) -> modes.ViewFactory:
    return lambda values: torch.optim.SGD([values], lr=lr)


def test_where_plain_asynchrony_diverges_staleness_aware_rules_do_not() -> None:
    replicas, lr, problem = 16, 0.2, Quadratic(least=0.05, noise=0.0)
    cluster = Cluster(replicas=replicas, jitter=0.2)

    def loss(mode: Mode) -> float:
        return World(cluster, mode, problem=problem, lr=lr).run(steps=replicas * 40).loss

    start = problem.loss(problem.start())
    assert loss(modes.strict()) < start / 4
    assert not loss(Mode("add", rule=Add(), weight=1.0)) < 1e6
    assert not loss(Mode("downpour", rule=Add(), optimizer=sgd(lr), push="gradient")) < 1e6
    assert loss(Mode("inverse", rule=InverseStaleness(), weight=1.0)) < start / 4
    assert loss(Mode("compensated", rule=DelayCompensated(), optimizer=sgd(lr), push="gradient")) < start / 4


def test_a_failed_replica_stops_nobody_and_starts_from_the_current_values() -> None:
    cluster = Cluster(replicas=3, jitter=0.1, failure_every=50.0, down_seconds=25.0)
    outcome = World(cluster, modes.decoupled(2, 0.5, 5), seed=2, problem=Quadratic(), lr=0.1).run(steps=1500)
    assert outcome.lost > 0
    assert outcome.loss < 0.2
    assert max(outcome.waited) == 0.0


@pytest.mark.parametrize(
    "mode",
    [
        Mode("dc", 1, DelayCompensated(0.1, False), sgd(0.02), "gradient", blocking=False),
        Mode("dc, s = 2", 1, DelayCompensated(0.1, False), sgd(0.02), "gradient", max_staleness=2),
        Mode("nesterov", 3, DelayedNesterov(period=4), blocking=False),
        modes.decoupled(1, 0.5, 3, 0.3, 0.5),
        Mode("ssp", 2, Add(), max_staleness=3, blocking=False),
        modes.diloco(4, 3),
    ],
    ids=lambda m: m.name,
)
def test_every_mode_learns_among_stalls_failures_and_slow_messages(mode: Mode) -> None:
    cluster = Cluster(
        replicas=4,
        jitter=0.3,
        stall_share=0.05,
        latency=0.3,
        link_jitter=0.5,
        failure_every=60.0,
        down_seconds=8.0,
    )
    problem = Quadratic()
    for seed in range(2):
        outcome = World(cluster, mode, seed=seed, owners=2, problem=problem, lr=0.05).run(steps=240)
        assert outcome.loss < problem.loss(problem.start()) / 2


def test_messages_take_latency_and_the_time_of_their_bytes() -> None:
    # 4 s of steps; two parts of 50 bytes at 50 bytes/s one after the other, 0.5 s each way, the same back.
    cluster = Cluster(replicas=1, latency=0.5, bandwidth=50.0, model_bytes=100.0)
    outcome = World(cluster, modes.asynchronous(4), owners=2).run(steps=12)
    assert outcome.seconds == pytest.approx(3 * 4 + 2 * (0.5 + 2.0 + 0.5 + 1.0))
    assert outcome.waited == [pytest.approx(8.0)]


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="give one of them an end"):
        World(Cluster(), modes.strict()).run()


def test_a_world_that_stands_still_says_so() -> None:
    # Two must deliver before anybody goes on, and one is away for ever.
    cluster = Cluster(replicas=2, failure_every=3.0, down_seconds=inf)
    with pytest.raises(RuntimeError, match="all replicas wait"):
        World(cluster, modes.diloco(2, 4), seed=0).run(steps=10_000)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"stall_share": 1.5}, "stall_share=1.5"),
        ({"latency": -1.0}, "latency=-1.0"),
        ({"speeds": (1.0, 2.0)}, "one factor for each of 4 replicas"),
        ({"speeds": (1.0, 2.0, 0.0, 1.0)}, r"speeds\[2\]=0.0"),
        ({"failure_every": 0.0}, "failure_every=0.0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Cluster(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Mode("m", sync_every=0), "sync_every=0"),
        (lambda: Mode("m", max_staleness=-1), "max_staleness=-1"),
        (lambda: Mode("m", sync_every=2, push="gradient"), "every step"),
        (lambda: Mode("m", rule=Quorum(), weight=0.5), "does not use a weight"),
        (lambda: Mode("m", rule=Quorum(), max_staleness=1), "Use max_staleness=None"),
        (lambda: Mode("m", rule=Elastic(0.1)), "reads after an exchange"),
        (lambda: Mode("m", failed="restart"), "failed='restart'"),
    ],
)
def test_a_mode_that_cannot_be_is_refused(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


def test_the_command_prints_a_row_for_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    words = "strict ssp:4 async:2 diloco decoupled:2 decoupled:2:0.1"
    cli.main(["simulate", "--seconds", "50", "--modes", words, "--learn", "quadratic", "--stall-share", "0.05"])
    printed = capsys.readouterr().out
    for word in (*words.split(), "loss", "stale"):
        assert word in printed


def test_the_commands_numbers_are_the_worlds() -> None:
    text = io.StringIO()
    parser = simulate.argparse.ArgumentParser()
    simulate.add_arguments(parser)
    options = parser.parse_args(["--stall-share", "0.05", "--seconds", "100", "--modes", "ssp:1"])
    [(name, outcome)] = simulate.simulate(options, Console(file=text, width=120))
    assert name == "ssp:1"
    assert outcome.steps == World(STALLS, modes.ssp(1)).run(seconds=100).steps
    assert str(sum(outcome.steps)) in text.getvalue()


@pytest.mark.parametrize("word", ["", "strict:1", "ssp", "ssp:x", "decoupled", "decoupled:0", "bsp"])
def test_a_mode_the_command_does_not_know_is_named(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--modes", word])
    assert (word or "--modes is empty") in capsys.readouterr().err


def test_the_module_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["--seconds", "20"])
    assert "ssp:16" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        simulate.main(["--replicas", "0"])
    assert "replicas=0" in capsys.readouterr().err
