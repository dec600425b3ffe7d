"""Which ranks hold one copy of the trajectory."""

from __future__ import annotations

from typing import Literal

from lightning_sync.comm.topology import Topology

Replica = Literal["auto", "rank", "node"] | int


def resolve_replica(replica: Replica, topology: Topology | None = None) -> list[list[int]]:
    """All replicas, as lists of ranks (empty without a topology: then only the value is checked).

    Raises:
        ValueError: for a value that is none of ``"auto"``, ``"rank"``, ``"node"`` or a positive integer, for a number
            that does not divide the number of ranks, and for ``"node"`` when nodes hold different numbers of ranks.
    """
    valid = replica in ("auto", "rank", "node") or (
        isinstance(replica, int) and not isinstance(replica, bool) and replica >= 1
    )
    if not valid:
        raise ValueError(f"replica={replica!r}: expected 'auto', 'rank', 'node' or a number of ranks of at least 1.")
    if topology is None:
        return []
    nodes = list(topology.by_node().values())
    if replica == "auto":
        replica = "node" if len(nodes) > 1 else "rank"
    if replica == "node":
        if topology.ranks_per_node is None:
            raise ValueError(f"replica='node' needs equal nodes, but they hold {[len(n) for n in nodes]} ranks.")
        return nodes
    size = 1 if replica == "rank" else int(replica)
    if topology.size % size:
        raise ValueError(f"replica={replica!r} does not divide the {topology.size} ranks; use one of its divisors.")
    return [list(range(start, start + size)) for start in range(0, topology.size, size)]
