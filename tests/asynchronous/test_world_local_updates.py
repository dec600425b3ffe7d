"""Dynamic local updates in the simulated world: what they do for a replica that is slow for good."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sync import cli
from lightning_sync.asynchronous import modes
from lightning_sync.asynchronous.cluster import Cluster
from lightning_sync.asynchronous.modes import Mode
from lightning_sync.asynchronous.problems import Quadratic
from lightning_sync.asynchronous.world import World

SLOW = Cluster(replicas=4, speeds=(1.0, 1.0, 1.0, 4.0))


def test_replicas_of_different_speeds_exchange_at_the_same_times() -> None:
    fixed, dynamic = (World(SLOW, m).run(seconds=2000) for m in (modes.asynchronous(16), modes.dylu(16)))
    assert sum(dynamic.steps) == pytest.approx(sum(fixed.steps), abs=4), "nobody waits in either"
    assert fixed.largest_lead > 80
    assert dynamic.largest_lead <= 5, "but for the slow one's first period, which lasts as long as four of the others'"
    assert dynamic.largest_staleness < fixed.largest_staleness


def test_with_periods_by_speed_a_bound_stops_hardly_anybody() -> None:
    free = sum(World(SLOW, modes.asynchronous(16)).run(seconds=2000).steps)
    bounded = Mode("ssp", sync_every=16, max_staleness=2, blocking=False)
    assert sum(World(SLOW, bounded).run(seconds=2000).steps) < 0.4 * free
    by_speed = replace(bounded, local_updates="dynamic")
    assert sum(World(SLOW, by_speed).run(seconds=2000).steps) > 0.95 * free


def test_equal_replicas_keep_their_period() -> None:
    cluster = Cluster(replicas=3, latency=0.1)
    fixed, dynamic = (
        World(cluster, m, problem=Quadratic(), lr=0.05).run(steps=400) for m in (modes.asynchronous(8), modes.dylu(8))
    )
    assert torch.equal(fixed.values, dynamic.values)
    assert fixed.versions == dynamic.versions


@pytest.mark.parametrize("failed", ["wait", "leave"])
def test_it_can_be_replayed_and_loses_nothing_among_stalls_and_failures(failed: str) -> None:
    cluster = replace(SLOW, jitter=0.1, stall_share=0.05, latency=0.2, failure_every=300.0, down_seconds=20.0)
    first, second = (
        World(cluster, replace(modes.dylu(8), failed=failed), seed=5, owners=2, problem=Quadratic()).run(seconds=900)
        for _ in range(2)
    )
    assert first.steps == second.steps
    assert torch.equal(first.values, second.values)
    assert (first.lost == 0) == (failed == "wait")


def test_the_command_knows_it_and_a_period_that_cannot_shrink_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["simulate", "--seconds", "100", "--modes", "strict dylu dylu:4", "--speeds", "1", "1", "1", "4"])
    assert "dylu:4" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"sync_every=1\): periods are cut down"):
        modes.dylu(1)
    with pytest.raises(ValueError, match=r"local_updates='fast'"):
        Mode("any", sync_every=2, local_updates="fast")
