"""Groups are made on all ranks in one order, and two levels only where they can be."""

from typing import Any

import pytest
import torch

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.flat_broadcast import broadcast_tensors
from lightning_sync.comm.groups import Wires, discover_topology, make_group_wire, make_wires
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors import Payload
from tests.workers import run_ranks


def members(wire: GroupWire | None, rank: int) -> list[int] | None:
    """Who is in the group, found out by a sum of one bit per rank."""
    if wire is None:
        return None
    bits = torch.zeros(8)
    bits[rank] = 1
    wire.round([Payload("sum", (bits,))])
    return bits.nonzero().flatten().tolist()


def layout(wires: Wires, rank: int) -> tuple[Any, ...]:
    return tuple(members(w, rank) for w in (wires.world, wires.intra, wires.inter))


def body(rank: int, world_size: int) -> dict[str, Any]:
    counters = Counters()
    found: dict[str, Any] = {"topology": discover_topology(node=rank // 2, device=torch.device("cpu"))}
    for nodes in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 0, 0, 0), (0, 1, 2, 3)):
        found[str(nodes)] = layout(make_wires(Topology(rank, nodes), counters), rank)
    found["off"] = layout(make_wires(Topology(rank, (0, 0, 1, 1)), counters, two_level=False), rank)
    found["on"] = layout(make_wires(Topology(rank, (0, 0, 0, 0)), counters, two_level=True), rank)
    part = make_group_wire([[0, 3], [1], [2]], Topology(rank, (0, 0, 1, 1)), counters)
    found["part"] = (members(part, rank), part.topology)
    tensors = [torch.full((3, 2), float(rank)), torch.full((), rank), torch.zeros(0), torch.full((5,), rank + 0.5)]
    broadcast_tensors(tensors, source=2)
    found["broadcast"] = [t.tolist() for t in tensors]
    turned = [torch.full((2, 3), float(rank)).t()]
    broadcast_tensors(turned, source=1, wire=make_wires(Topology(rank, (0, 1, 2, 3)), counters).world)
    found["over a wire"] = turned[0].tolist()
    return found


@pytest.mark.dist
def test_groups() -> None:
    everyone = [0, 1, 2, 3]
    for rank, found in enumerate(run_ranks(body, 4)):
        assert found["topology"] == Topology(rank, (0, 0, 1, 1))
        assert found["(0, 0, 1, 1)"] == (everyone, [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2])
        assert found["(0, 1, 0, 1)"] == (everyone, [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2])
        assert found["(0, 0, 0, 1)"] == (everyone, None, None), "unequal nodes: flat"
        assert found["(0, 0, 0, 0)"] == (everyone, None, None), "one node: flat"
        assert found["(0, 1, 2, 3)"] == (everyone, None, None), "one rank per node: flat"
        assert found["off"] == (everyone, None, None)
        assert found["on"] == (everyone, everyone, [rank]), "one level inside, groups of one between"
        assert (
            found["part"]
            == {
                0: ([0, 3], Topology(0, (0, 1))),
                1: ([1], Topology(0, (0,))),
                2: ([2], Topology(0, (1,))),
                3: ([0, 3], Topology(1, (0, 1))),
            }[rank]
        )
        assert found["broadcast"] == [[[2.0, 2.0]] * 3, 2, [], [2.5] * 5]
        assert found["over a wire"] == [[1.0, 1.0]] * 3


def test_two_levels_need_equal_nodes() -> None:
    with pytest.raises(
        ValueError, match=r"two_level=True needs the same number of ranks on every node.*\(0, \[0, 1\]\)"
    ):
        make_wires(Topology(0, (0, 0, 1)), Counters(), two_level=True)
