"""Process groups for reductions: made once, on all ranks, in one order."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire


@dataclass
class Wires:
    """The wires one reducer uses.

    Attributes:
        world: All ranks that reduce together.
        intra: The ranks of this node, and
        inter: those with this rank's place on their nodes; both `None` when reductions are flat.
    """

    world: GroupWire
    intra: GroupWire | None = None
    inter: GroupWire | None = None

    def close(self) -> None:
        """Give the groups' sockets and threads back (local: no rank waits for another)."""
        for wire in (self.world, self.intra, self.inter):
            if wire is not None and wire.group is not None:
                dist.destroy_process_group(wire.group)

    def abandon(self) -> None:
        """Leave the groups as they are until the process ends, after a failure."""
        for wire in (self.world, self.intra, self.inter):
            if wire is not None and wire.group is not None:
                abandon(wire.group)


def abandon(group: dist.ProcessGroup) -> None:
    """Never destroy a group in which a collective may be blocked.

    A collective that another rank never joined cannot be cancelled. The group's destructor waits for it, so that the
    interpreter would not end as long as the other rank lives.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(group)))


def discover_topology(node: int, device: torch.device) -> Topology:
    """Ask every rank which node it is on (collective on the default group)."""
    mine = torch.tensor([node], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return Topology(dist.get_rank(), tuple(int(n) for n in everyone))


def agree_on_run_id(device: torch.device) -> str:
    """A random name for one `fit`, drawn by rank 0 (collective on the default group).

    Keys in the store carry it: a process may train several times, with strategies that know nothing of each other.
    """
    token = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    dist.broadcast(token, 0)
    return f"{int(token):016x}"


def make_wires(
    topology: Topology,
    counters: Counters,
    wait: Callable[[dist.Work], None] | None = None,
    two_level: bool | None = None,
    timeout: float | None = None,
    backend: str | None = None,
) -> Wires:
    """Create the groups for reductions over all ranks.

    Args:
        topology: All ranks of the default group.
        counters: Where their bytes are counted.
        wait: See `GroupWire`.
        timeout: Seconds after which a collective of these groups fails, and they with it; `None`: torch's default.
        backend: Of these groups; `None`: the default group's.
        two_level: Reduce inside each node first, exactly, and between nodes only this node's share per rank. `None`:
            when there are several nodes with several ranks each.

    Raises:
        ValueError: if `two_level` is asked for, but nodes hold different numbers of ranks.
    """
    if two_level and topology.ranks_per_node is None:
        raise ValueError(
            f"two_level=True needs the same number of ranks on every node, got {sorted(topology.by_node().items())}. "
            "Start equal numbers, or use two_level=False."
        )
    wires = Wires(
        GroupWire(_group(list(range(topology.size)), topology.rank, timeout, backend), topology, counters, wait)
    )
    per_node = topology.ranks_per_node
    worthwhile = per_node is not None and 1 < per_node < topology.size
    if not (worthwhile if two_level is None else two_level):
        return wires
    nodes = list(topology.by_node().values())
    for ranks in nodes:  # every rank takes part in the creation of every group, in this order
        group = _group(ranks, topology.rank, timeout, backend)
        if group is not None:
            wires.intra = GroupWire(group, topology.intra(), counters, wait)
    for place in range(len(nodes[0])):
        group = _group([ranks[place] for ranks in nodes], topology.rank, timeout, backend)
        if group is not None:
            wires.inter = GroupWire(group, topology.inter(), counters, wait)
    return wires


def make_group_wire(
    partition: list[list[int]],
    topology: Topology,
    counters: Counters,
    wait: Callable[[dist.Work], None] | None = None,
    timeout: float | None = None,
) -> GroupWire:
    """One group per part of all ranks; returns the wire of the part this rank is in."""
    wires = []
    for ranks in partition:
        group = _group(ranks, topology.rank, timeout)
        if group is not None:
            nodes = tuple(topology.nodes[r] for r in ranks)
            wires.append(GroupWire(group, Topology(ranks.index(topology.rank), nodes), counters, wait))
    (wire,) = wires
    return wire


def _group(ranks: list[int], rank: int, timeout: float | None, backend: str | None = None) -> dist.ProcessGroup:
    group = dist.new_group(ranks, timeout=None if timeout is None else timedelta(seconds=timeout), backend=backend)
    return group if rank in ranks else None  # type: ignore[return-value]
