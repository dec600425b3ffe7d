"""What each collective sends is arithmetic on who sits where."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sync.comm.topology import Bytes, Topology

layouts = st.lists(st.integers(0, 3), min_size=1, max_size=8).map(tuple)
equal_layouts = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda shape: st.permutations([node for node in range(shape[0]) for _ in range(shape[1])]).map(tuple)
)


def views(nodes: tuple[int, ...]) -> list[Topology]:
    return [Topology(rank, nodes) for rank in range(len(nodes))]


def total(costs: list[Bytes]) -> Bytes:
    return sum(costs, Bytes())


@given(layouts, st.integers(0, 10**9))
def test_a_ring_sends_the_same_from_every_rank_and_all_of_it_one_way(nodes: tuple[int, ...], nbytes: int) -> None:
    n = len(nodes)
    for view in views(nodes):
        cost = view.all_reduce(nbytes)
        assert cost.sent == (Fraction(2 * nbytes * (n - 1), n) if n > 1 else 0), "exactly, with no rounding"
        assert cost.network in (0, cost.sent)
    borders = sum(nodes[r] != nodes[(r + 1) % n] for r in range(n))
    assert total([v.all_reduce(nbytes) for v in views(nodes)]).network == borders * Fraction(2 * nbytes * (n - 1), n)


@given(layouts, st.data())
def test_direct_messages_cost_what_leaves_the_rank(nodes: tuple[int, ...], data: st.DataObject) -> None:
    n = len(nodes)
    sizes = data.draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n))
    for view in views(nodes):
        cost = view.all_to_all(sizes)
        assert cost.sent == sum(sizes) - sizes[view.rank]
        assert cost.network == sum(s for peer, s in enumerate(sizes) if nodes[peer] != nodes[view.rank])
        assert view.all_gather(7).sent == 7 * (n - 1)
        assert view.broadcast(7, source=0) == (view.all_gather(7) if view.rank == 0 else Bytes())


@given(equal_layouts)
def test_two_levels_are_a_grid(nodes: tuple[int, ...]) -> None:
    """Every rank is on one node and in one row across nodes; ranks of a row hold the same place on their nodes."""
    for view in views(nodes):
        inside, across = view.intra(), view.inter()
        assert inside.size * across.size == view.size
        assert len(set(inside.nodes)) == 1
        assert len(set(across.nodes)) == across.size
        assert set(view.intra_ranks()) & set(view.inter_ranks()) == {view.rank}
        assert view.intra_ranks()[inside.rank] == view.inter_ranks()[across.rank] == view.rank
        assert {tuple(Topology(r, nodes).inter_ranks()) for r in view.inter_ranks()} == {tuple(view.inter_ranks())}


def test_nodes_of_different_size_are_seen() -> None:
    assert Topology(0, (0, 0, 1)).ranks_per_node is None
    assert Topology(0, (0, 1, 0, 1)).ranks_per_node == 2


@given(layouts)
def test_messages_leave_a_node_only_where_bytes_do(nodes: tuple[int, ...]) -> None:
    for view in views(nodes):
        assert bool(view.ring_messages) == bool(view.all_reduce(8).network)
        assert bool(view.direct_messages) == bool(view.all_gather(8).network)


def test_the_arithmetic_behind_the_two_level_default() -> None:
    """2 nodes of 8: per interface, of one float32 gradient: bf16 ring 0.94, flat int8 2.0, two levels of int8 0.25."""
    nodes = (0,) * 8 + (1,) * 8
    gradient = 4 * 16 * 8 * 1000
    ranks = views(nodes)[:8]
    int8 = gradient // 4
    ring = total([r.all_reduce(gradient // 2) for r in ranks]).network / gradient
    flat = total([r.all_to_all([int8 // 16] * 16) + r.all_gather(int8 // 16) for r in ranks]).network / gradient
    levels = total([r.inter().all_to_all([int8 // 16] * 2) + r.inter().all_gather(int8 // 16) for r in ranks]).network
    assert float(ring) == pytest.approx(0.9375)
    assert float(flat) == pytest.approx(2.0)
    assert float(levels / gradient) == pytest.approx(0.25)


def test_bytes_add_up_exactly() -> None:
    third = Bytes(Fraction(1, 3), 0)
    assert (third + third + third) == Bytes(1, 0)
