"""Clocks of replicas, and what a bound on staleness lets a replica read.

A replica's clock c is the number of exchanges it has finished: c updates, numbered 0 to c - 1, which all owners have
acknowledged. With a staleness bound s (Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel
parameter server", section 3), whoever is at clock c computes on parameters that contain every update numbered up to
c - s - 1 of every replica. That takes two things: the updates exist (`may_start`), and the copy that is computed on
contains them (`missing`). A bound on the lead alone gives the first only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_sync.checks import check_integer


def check_bound(owner: str, bound: int | None) -> None:
    """A bound is `None` (none: asynchronous) or an integer of at least 0 (0: in step)."""
    if bound is not None:
        check_integer(owner, 0, max_staleness=bound)


class Clocks:
    """The clocks of all replicas. Not locked: whoever shares it between threads locks every call.

    Args:
        replicas: How many there are; they are numbered from 0.
    """

    def __init__(self, replicas: int) -> None:
        check_integer("Clocks", 1, replicas=replicas)
        self._clocks = [0] * replicas
        self._retired = [False] * replicas
        # One more than the number of the last update made; lower than the clock after a return.
        self._made = [0] * replicas
        # Its value when a replica came back for the last time, and the clock then: no update has a number in between.
        self._gaps = [(0, 0)] * replicas

    def __len__(self) -> int:
        return len(self._clocks)

    def __getitem__(self, replica: int) -> int:
        """The replica's clock."""
        return self._clocks[self._known(replica)]

    def advance(self, replica: int) -> int:
        """One exchange of this replica is finished: its new clock.

        Raises:
            RuntimeError: if the replica is retired.
        """
        if not self.counts(replica):
            raise RuntimeError(f"Clocks.advance(replica={replica}): it is retired; call rejoin({replica}) first.")
        self._clocks[replica] += 1
        self._made[replica] = self._clocks[replica]
        return self._clocks[replica]

    def retire(self, replica: int) -> None:
        """Nobody waits for this replica any more: it is out of data, or dead. Again is no error."""
        self._retired[self._known(replica)] = True

    def rejoin(self, replica: int, at_least: int = 0) -> int:
        """A retired replica goes on from the current parameters: its new clock, no lower than the least of the others.

        At its old clock everybody would wait until it had caught up.

        Args:
            replica: Who returns.
            at_least: Another floor: one more than the highest clock it has ever sent, since an update that only some
                owners took before it left must not share its number with a new one.

        Raises:
            RuntimeError: if it was not retired.
        """
        if self.counts(replica):
            raise RuntimeError(f"Clocks.rejoin(replica={replica}): it is not retired.")
        back = max(self._clocks[replica], self.least(), at_least)
        self._gaps[replica] = (self._made[replica], back)
        self._clocks[replica], self._retired[replica] = back, False
        return back

    def counts(self, replica: int) -> bool:
        """Whether others wait for this replica."""
        return not self._retired[self._known(replica)]

    def living(self) -> list[int]:
        """The replicas that count."""
        return [r for r, retired in enumerate(self._retired) if not retired]

    def least(self) -> int:
        """The lowest clock of those that count; the highest of all where none does, so that nobody waits."""
        return min((self._clocks[r] for r in self.living()), default=max(self._clocks))

    def lead(self, replica: int) -> int:
        """How many exchanges a replica is ahead of the slowest that counts."""
        return self._clocks[self._known(replica)] - self.least()

    def may_start(self, replica: int, bound: int | None, ahead: int = 0) -> bool:
        """Whether a replica may compute its next update, number c, with bound s: whether all clocks have reached c - s.

        Args:
            replica: Who asks.
            bound: s. Smaller keeps replicas closer together and makes them wait more; None never waits.
            ahead: Its updates that are sent but not acknowledged yet: c is its clock plus these.
        """
        return bound is None or self.least() >= self[replica] + ahead - bound

    def needed(self, replica: int, bound: int | None, ahead: int = 0) -> dict[int, int]:
        """What a copy must contain before this replica computes its next update, number c, on it.

        Args:
            replica: Who computes.
            bound: s, or None for no demand.
            ahead: As in `may_start`.

        Returns:
            For every replica, the number of the first update that need not be in the copy: c - s, or less where it
            left before making that many. To be compared with `Shard.contains`.
        """
        least = 0 if bound is None else max(0, self[replica] + ahead - bound)
        return {r: self._made_below(r, least) for r in range(len(self._clocks))}

    def missing(self, replica: int, bound: int | None, contains: Mapping[int, int], ahead: int = 0) -> list[int]:
        """The replicas of which a copy lacks updates that the bound demands; empty: the copy may be computed on.

        Args:
            replica: Who computes.
            bound: s, or None.
            contains: What the copy contains: per replica, one more than its last update's number (absent: nothing).
            ahead: As in `may_start`.
        """
        return [r for r, least in self.needed(replica, bound, ahead).items() if contains.get(r, 0) < least]

    def state(self) -> dict[str, Any]:
        """All there is to restore, as lists of numbers."""
        return {
            "clocks": list(self._clocks),
            "retired": list(self._retired),
            "made": list(self._made),
            "gaps": [list(gap) for gap in self._gaps],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            ValueError: if it belongs to another number of replicas.
        """
        if len(state["clocks"]) != len(self):
            raise ValueError(f"Clocks.load_state: {len(state['clocks'])} clocks for {len(self)} replicas.")
        self._clocks = [int(c) for c in state["clocks"]]
        self._retired = [bool(r) for r in state["retired"]]
        self._made = [int(m) for m in state["made"]]
        self._gaps = [(int(made), int(back)) for made, back in state["gaps"]]

    def _made_below(self, replica: int, number: int) -> int:
        """One more than the last update below `number` that this replica has made or can still make."""
        if self._retired[replica]:
            return min(number, self._made[replica])
        made, back = self._gaps[replica]
        return min(number, made) if number <= back else number

    def _known(self, replica: int) -> int:
        if isinstance(replica, bool) or not isinstance(replica, int) or not 0 <= replica < len(self._clocks):
            raise ValueError(f"replica={replica!r}: expected an integer from 0 to {len(self._clocks) - 1}.")
        return replica


def least_clocks(copies: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """What a whole model contains whose shards were read one by one: of each replica, the least over its shards.

    Args:
        copies: `Read.contains` of every shard.
    """
    copies = list(copies)
    senders = set().union(*copies)
    return {s: min(copy.get(s, 0) for copy in copies) for s in senders}
