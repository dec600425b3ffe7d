"""A replica that is slower makes fewer steps between two exchanges, in proportion to its speed."""

from __future__ import annotations

import random

import pytest
from torch.distributed import HashStore

from lightning_sync.comm.board import Board
from lightning_sync.periodic.local_updates import LocalUpdates, local_steps


@pytest.mark.parametrize("seed", range(20))
def test_periods_are_the_papers_and_never_below_1(seed: int) -> None:
    dice = random.Random(seed)
    longest = dice.randint(1, 100)
    seconds = [2.0 ** -dice.randint(0, 8) for _ in range(6)]  # whose shares are exact
    speeds = [1 / s for s in seconds]
    for rank, speed in enumerate(speeds):
        expected = int(speed * longest // max(speeds))
        assert local_steps(longest, seconds, rank) == max(1, expected)
    assert local_steps(longest, seconds, seconds.index(min(seconds))) == longest


class Cluster:
    """Replicas with clocks of their own, over one store."""

    def __init__(self, seconds: list[float], longest: int) -> None:
        self.seconds, store = seconds, HashStore()
        self.now, self.waited, self.steps = [0.0] * len(seconds), [0.0] * len(seconds), [0] * len(seconds)
        self.local = [
            LocalUpdates(
                Board(store, "speed"), r, len(seconds), longest, lambda r=r: self.waited[r], lambda r=r: self.now[r]  # type: ignore[misc]
            )
            for r in range(len(seconds))
        ]  # fmt: skip

    def exchange(self, rank: int, waited: float = 0.0) -> int:
        """Make the steps of a period, of which the replica then waits for a while."""
        local = self.local[rank]
        self.now[rank] += local.every * self.seconds[rank] + waited
        self.steps[rank] += local.every
        self.waited[rank] += waited
        return local.exchanged(self.steps[rank])


def test_nothing_changes_until_all_have_left_a_note() -> None:
    cluster = Cluster([0.25, 1.0, 0.5], longest=16)
    assert [cluster.exchange(0), cluster.exchange(1)] == [16, 16]
    assert [cluster.exchange(r) for r in (2, 0, 1)] == [8, 16, 4]


def test_time_in_which_others_were_waited_for_says_nothing_of_the_own_speed() -> None:
    cluster = Cluster([0.25, 0.5], longest=8)
    for _ in range(3):
        periods = [cluster.exchange(0, waited=100.0), cluster.exchange(1)]
    assert periods == [8, 4]


def test_pauses_and_what_is_left_out_do_not_count() -> None:
    cluster = Cluster([0.25, 0.5], longest=8)
    cluster.exchange(0)
    local = cluster.local[1]
    local.pause()
    cluster.now[1] += 1000
    local.go_on()
    assert cluster.exchange(1) == 4
    cluster.now[1] += 1000
    local.begin(cluster.steps[1])
    assert local.exchanged(cluster.steps[1]) == 4, "no step was made: the period stays"
    assert cluster.exchange(1) == 4


def test_a_replica_that_becomes_slow_or_fast_is_followed() -> None:
    cluster = Cluster([0.25, 0.25], longest=16)
    for _ in range(2):
        assert [cluster.exchange(0), cluster.exchange(1)][1] == 16
    cluster.seconds[1] = 1.0
    for _ in range(40):
        slow = [cluster.exchange(0), cluster.exchange(1)][1]
    assert slow in (4, 5), "4 is where the mean ends up"
    cluster.seconds[1] = 0.125
    for _ in range(200):
        periods = [cluster.exchange(0), cluster.exchange(1)]
    assert periods[0] in (8, 9)
    assert periods[1] == 16
