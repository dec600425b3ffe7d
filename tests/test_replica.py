"""Which ranks hold one copy of the trajectory."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sync.comm.topology import Topology
from lightning_sync.replica import resolve_replica

ONE_NODE, TWO_NODES, UNEQUAL = Topology(0, (0, 0, 0, 0)), Topology(0, (0, 1, 0, 1)), Topology(0, (0, 0, 1))


@pytest.mark.parametrize(
    ("replica", "topology", "expected"),
    [
        ("rank", ONE_NODE, [[0], [1], [2], [3]]),
        ("auto", ONE_NODE, [[0], [1], [2], [3]]),
        ("auto", TWO_NODES, [[0, 2], [1, 3]]),
        ("node", TWO_NODES, [[0, 2], [1, 3]]),
        ("node", ONE_NODE, [[0, 1, 2, 3]]),
        (2, ONE_NODE, [[0, 1], [2, 3]]),
        (1, UNEQUAL, [[0], [1], [2]]),
        (3, UNEQUAL, [[0, 1, 2]]),
    ],
)
def test_replicas(replica: Any, topology: Topology, expected: list[list[int]]) -> None:
    assert resolve_replica(replica, topology) == expected


@given(st.integers(1, 12), st.integers(1, 12))
def test_a_number_cuts_the_ranks_into_equal_parts_or_is_refused(size: int, world_size: int) -> None:
    topology = Topology(0, (0,) * world_size)
    if world_size % size:
        with pytest.raises(ValueError, match=f"replica={size} does not divide the {world_size} ranks"):
            resolve_replica(size, topology)
    else:
        replicas = resolve_replica(size, topology)
        assert sorted(rank for ranks in replicas for rank in ranks) == list(range(world_size))
        assert {len(r) for r in replicas} == {size}


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "nodes", None])
def test_a_wrong_value_is_refused_before_there_is_a_group(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"replica=.*expected 'auto', 'rank', 'node' or a number"):
        resolve_replica(wrong)
    assert resolve_replica("node") == []


@pytest.mark.parametrize("replica", ["auto", "node"])
def test_nodes_of_different_size_hold_no_replicas(replica: Any) -> None:
    with pytest.raises(ValueError, match=r"replica='node' needs equal nodes, but they hold \[2, 1\] ranks"):
        resolve_replica(replica, UNEQUAL)
