from __future__ import annotations

import random

import pytest

from lightning_sync.asynchronous.clocks import Clocks, check_bound, least_clocks


def clocks_at(*values: int) -> Clocks:
    clocks = Clocks(len(values))
    for replica, value in enumerate(values):
        for _ in range(value):
            clocks.advance(replica)
    return clocks


def test_clocks_start_at_zero_and_count_finished_exchanges() -> None:
    clocks = Clocks(3)
    assert [clocks[r] for r in range(3)] == [0, 0, 0]
    assert clocks.advance(1) == 1
    assert (clocks.least(), clocks.lead(1), clocks.lead(0)) == (0, 1, 0)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_replica_may_start_while_it_leads_by_at_most_the_bound(bound: int) -> None:
    clocks = Clocks(2)
    for _ in range(bound + 1):
        assert clocks.may_start(0, bound)
        clocks.advance(0)
    assert not clocks.may_start(0, bound)
    assert clocks.may_start(1, bound)
    clocks.advance(1)
    assert clocks.may_start(0, bound)


def test_without_a_bound_nobody_waits_and_nothing_is_needed() -> None:
    clocks = clocks_at(100, 0)
    assert clocks.may_start(0, None)
    assert clocks.missing(0, None, {}) == []


def test_a_copy_must_hold_every_update_up_to_the_clock_less_the_bound() -> None:
    clocks = clocks_at(7, 5, 9)
    assert clocks.needed(0, 2) == {0: 5, 1: 5, 2: 5}
    assert clocks.missing(0, 2, {0: 7, 1: 5, 2: 5}) == []
    assert clocks.missing(0, 2, {0: 7, 1: 4, 2: 9}) == [1]
    assert clocks.missing(0, 2, {0: 7, 2: 9}) == [1]


def test_a_retired_replica_holds_nobody_back_and_only_what_it_made_is_needed() -> None:
    clocks = clocks_at(10, 3, 10)
    assert not clocks.may_start(0, 1)
    clocks.retire(1)
    clocks.retire(1)  # a death may be noticed twice
    assert clocks.living() == [0, 2]
    assert clocks.may_start(0, 1)
    assert clocks.needed(0, 1) == {0: 9, 1: 3, 2: 9}
    with pytest.raises(RuntimeError, match="retired"):
        clocks.advance(1)


def test_a_returning_replica_starts_at_the_slowest_clock_and_never_made_what_lies_between() -> None:
    clocks = clocks_at(10, 3, 12)
    clocks.retire(1)
    assert clocks.rejoin(1) == 10
    assert clocks.may_start(2, 2)
    assert not clocks.may_start(2, 1)
    assert clocks.needed(2, 4)[1] == 3  # updates 3 to 9 of replica 1 do not exist
    for _ in range(4):
        clocks.advance(1)
    assert clocks.needed(2, 1)[1] == 11
    with pytest.raises(RuntimeError, match="not retired"):
        clocks.rejoin(1)


def test_a_replica_that_was_ahead_when_it_left_keeps_its_clock() -> None:
    clocks = clocks_at(2, 9)
    clocks.retire(1)
    assert clocks.rejoin(1) == 9


def test_when_all_have_left_nobody_waits() -> None:
    clocks = clocks_at(2, 5)
    clocks.retire(0)
    clocks.retire(1)
    assert clocks.least() == 5
    assert clocks.may_start(1, 0)


def test_clocks_go_on_from_their_state() -> None:
    clocks = clocks_at(4, 2, 6)
    clocks.retire(1)
    clocks.rejoin(1)
    clocks.retire(2)
    other = Clocks(3)
    other.load_state(clocks.state())
    assert other.state() == clocks.state()
    assert other.needed(0, 1) == clocks.needed(0, 1)
    with pytest.raises(ValueError, match="3 clocks for 2 replicas"):
        Clocks(2).load_state(clocks.state())


@pytest.mark.parametrize("replica", [-1, 2, True, "0"])
def test_a_replica_that_does_not_exist_is_an_error(replica: object) -> None:
    with pytest.raises(ValueError, match="expected an integer from 0 to 1"):
        Clocks(2).advance(replica)  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [-1, 1.5, True, "4"])
def test_a_bound_that_is_no_count_is_refused(bound: object) -> None:
    with pytest.raises(ValueError, match="max_staleness"):
        check_bound("ssp", bound)  # type: ignore[arg-type]


def test_a_model_contains_what_all_its_shards_contain() -> None:
    assert least_clocks([{0: 3, 1: 5}, {0: 4, 1: 2}, {0: 3}]) == {0: 3, 1: 0}
    assert least_clocks([]) == {}


@pytest.mark.parametrize("seed", range(5))
def test_whoever_may_start_finds_all_it_needs_made_whatever_leaves_and_returns(seed: int) -> None:
    rng, clocks, made = random.Random(seed), Clocks(5), dict.fromkeys(range(5), 0)
    for _ in range(2000):
        replica, bound = rng.randrange(5), rng.choice([0, 1, 3])
        if not clocks.counts(replica):
            if rng.random() < 0.2:
                clocks.rejoin(replica)
        elif rng.random() < 0.02:
            clocks.retire(replica)
        elif clocks.may_start(replica, bound):
            assert clocks.missing(replica, bound, made) == []
            made[replica] = clocks.advance(replica)
