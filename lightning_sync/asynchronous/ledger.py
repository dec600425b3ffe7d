"""Which contributions a shard has taken, so that none is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Stalenesses from here on are counted together; the largest is kept exactly.
_LAST_BIN = 1023


class SequenceGapError(RuntimeError):
    """A contribution came before its predecessor: one was lost, or the sender is not whom it says."""


@dataclass(frozen=True)
class Staleness:
    """Staleness, in versions, of the contributions taken so far.

    Attributes:
        mean: Mean.
        p95: The smallest value that at least 95 % do not exceed.
        largest: The largest.
        histogram: How many had which; 1023 stands for that and more.
    """

    mean: float
    p95: int
    largest: int
    histogram: dict[int, int]


class Ledger:
    """The next sequence number of every sender, and counts. Not locked."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._stale: Counter[int] = Counter()
        self._stale_sum = self._stale_max = 0
        self.taken = 0
        """Contributions taken."""
        self.repeated = 0
        """Contributions rejected because they had been taken before."""

    def expected(self, sender: int) -> int:
        """The sequence number of this sender's next contribution: what a returning replica goes on with."""
        return self._next.get(sender, 0)

    def admit(self, sender: int, sequence: int) -> bool:
        """Whether a contribution is the sender's next; a repeated or old one is counted and must be ignored.

        Raises:
            SequenceGapError: if one before it is missing. Nothing is changed.
        """
        expected = self.expected(sender)
        if sequence > expected:
            raise SequenceGapError(
                f"Replica {sender} sent contribution {sequence}, but {expected} has not arrived. The transport must "
                "deliver each sender's contributions in order, and repeat what was lost."
            )
        if sequence < expected:
            self.repeated += 1
        return sequence == expected

    def take(self, sender: int, staleness: int) -> None:
        """The contribution just admitted has been taken, with this staleness."""
        self._next[sender] = self.expected(sender) + 1
        self.taken += 1
        self._stale[min(staleness, _LAST_BIN)] += 1
        self._stale_sum += staleness
        self._stale_max = max(self._stale_max, staleness)

    def staleness(self) -> Staleness:
        """The distribution so far; zeros before the first contribution."""
        seen, p95 = 0, 0
        for value in sorted(self._stale):
            seen += self._stale[value]
            if seen * 20 >= self.taken * 19:
                p95 = value
                break
        mean = self._stale_sum / self.taken if self.taken else 0.0
        return Staleness(mean, p95, self._stale_max, dict(sorted(self._stale.items())))

    def state(self) -> dict[str, Any]:
        """All there is to restore, as numbers."""
        return {
            "next": dict(self._next),
            "stale": dict(self._stale),
            "stale_sum": self._stale_sum,
            "stale_max": self._stale_max,
            "taken": self.taken,
            "repeated": self.repeated,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._next, self._stale = dict(state["next"]), Counter(state["stale"])
        self._stale_sum, self._stale_max = state["stale_sum"], state["stale_max"]
        self.taken, self.repeated = state["taken"], state["repeated"]
