"""Which rank sits on which node, and what each collective then sends: the arithmetic behind every byte we report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank sends; exact, since a ring sends 2 p (N-1)/N and three ranks divide few payloads evenly.

    Attributes:
        sent: To other ranks, wherever they are.
        network: Of these, to ranks on other nodes. The sum over a node's ranks crosses its network interface.
    """

    sent: Fraction | int = 0
    network: Fraction | int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.sent + other.sent, self.network + other.network)


@dataclass(frozen=True)
class Topology:
    """A group of ranks as one of them sees it.

    Attributes:
        rank: This rank's place in the group.
        nodes: The node of every rank of the group, in group order.

    The costs are those of the algorithms that gloo uses, and of NCCL's ring: a ring in group order for the
    all-reduce, direct messages for the all-to-all. NCCL may choose a tree instead; the bytes sent per rank are the same
    to within the pipeline's ends, the bytes per interface may be fewer.
    """

    rank: int
    nodes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks, N."""
        return len(self.nodes)

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node, or `None` when nodes hold different numbers."""
        counts = {self.nodes.count(node) for node in set(self.nodes)}
        return counts.pop() if len(counts) == 1 else None

    def is_remote(self, peer: int) -> bool:
        """Whether that rank sits on another node."""
        return self.nodes[peer] != self.nodes[self.rank]

    # For every piece of data gloo sends two messages, the data and a note that its receiver is ready, and its ring cuts
    # what goes to the next rank in two pieces. Measured between two hosts: 410 bytes of headers and acknowledgements
    # for each piece, whatever its size.

    @property
    def ring_messages(self) -> int:
        """Messages of one ring all-reduce that leave this node."""
        return 2 * 2 * 2 * (self.size - 1) if self.is_remote((self.rank + 1) % self.size) else 0

    @property
    def direct_messages(self) -> int:
        """Messages of one all-to-all that leave this node."""
        return 2 * sum(self.is_remote(peer) for peer in range(self.size))

    def all_reduce(self, nbytes: int) -> Bytes:
        """Ring all-reduce of `nbytes`: 2 p (N-1)/N, all of it to the next rank."""
        if self.size == 1:
            return Bytes()
        sent = Fraction(2 * nbytes * (self.size - 1), self.size)
        return Bytes(sent, sent if self.is_remote((self.rank + 1) % self.size) else 0)

    def all_to_all(self, nbytes: Sequence[int]) -> Bytes:
        """Direct messages, `nbytes[r]` to rank r; what stays here costs nothing."""
        peers = [r for r in range(self.size) if r != self.rank]
        return Bytes(sum(nbytes[r] for r in peers), sum(nbytes[r] for r in peers if self.is_remote(r)))

    def all_gather(self, nbytes: int) -> Bytes:
        """The same `nbytes` to every other rank, directly: p (N-1)."""
        return self.all_to_all([nbytes] * self.size)

    def broadcast(self, nbytes: int, source: int) -> Bytes:
        """From one rank to all others, counted at the source (gloo's tree lets some of the others pass it on)."""
        return self.all_gather(nbytes) if self.rank == source else Bytes()

    def intra(self) -> Topology:
        """The ranks of this rank's node."""
        here = [r for r in range(self.size) if not self.is_remote(r)]
        return Topology(here.index(self.rank), tuple(self.nodes[r] for r in here))

    def inter(self) -> Topology:
        """The ranks that hold the same place on their nodes as this one does on its own."""
        peers = self.inter_ranks()
        return Topology(peers.index(self.rank), tuple(self.nodes[r] for r in peers))

    def intra_ranks(self) -> list[int]:
        """Group ranks on this node."""
        return [r for r in range(self.size) if not self.is_remote(r)]

    def inter_ranks(self) -> list[int]:
        """Group ranks with this rank's place on their nodes, in node order of appearance."""
        place = self.intra_ranks().index(self.rank)
        return [ranks[place] for ranks in self.by_node().values()]

    def by_node(self) -> dict[int, list[int]]:
        """Group ranks of each node, in order of appearance."""
        table: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            table.setdefault(node, []).append(rank)
        return table
