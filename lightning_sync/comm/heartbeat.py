"""Signs of life: what each rank last said, and for how long it has said nothing new."""

from dataclasses import dataclass
from typing import NamedTuple

_HOST_LIMIT = 255


class Straggler(NamedTuple):
    """A rank that others wait for.

    Attributes:
        rank: The rank.
        host: Its host, ``"?"`` if it was never heard of.
        step: Steps it had begun when it was last heard of.
        silent_for: Seconds for which nothing new was heard.
    """

    rank: int
    host: str
    step: int
    silent_for: float

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}) at step {self.step}, last heard of {self.silent_for:.1f} s ago"


@dataclass
class _Life:
    host: str = "?"
    step: int = 0
    finished: bool = False
    text: str = ""
    silent_for: float = 0.0


def encode_beat(number: int, step: int, finished: bool, host: str) -> str:
    """Return the text of one sign of life; ``number`` makes it differ from the one before."""
    return f"{number} {step} {int(finished)} {host[:_HOST_LIMIT]}"


class LifeTable:
    """The last sign of life of every rank, as one observer saw it.

    Silence is measured by the observer alone, so that the hosts' clocks need not agree, and it grows by at most
    ``longest_gap`` per observation, so that an observer which was itself suspended does not take the others for dead.

    Args:
        world_size: Number of ranks.
        longest_gap: Seconds counted at most between two observations.
    """

    def __init__(self, world_size: int, longest_gap: float) -> None:
        self._lives = [_Life() for _ in range(world_size)]
        self._longest_gap = longest_gap

    def observe(self, beats: dict[int, str], elapsed: float) -> None:
        """Take in the texts read from the store, ``elapsed`` seconds after the previous ones."""
        for rank, life in enumerate(self._lives):
            text = beats.get(rank, "")
            parts = text.split(" ", 3)
            if text == life.text or len(parts) != 4 or not parts[1].isdecimal():
                life.silent_for += min(elapsed, self._longest_gap)
                continue
            life.text, life.silent_for = text, 0.0
            life.step, life.finished, life.host = int(parts[1]), parts[2] == "1", parts[3]

    def host(self, rank: int) -> str:
        """Return the rank's host, ``"?"`` if it was never heard of."""
        return self._lives[rank].host

    def step(self, rank: int) -> int:
        """Return how many steps the rank had begun when it was last heard of."""
        return self._lives[rank].step

    def finished(self, rank: int) -> bool:
        """Return whether the rank said that it has run out of steps."""
        return self._lives[rank].finished

    def silent(self, seconds: float) -> list[Straggler]:
        """Return the ranks that were heard of once, have not finished, and said nothing new for ``seconds``."""
        return [
            self._row(rank)
            for rank, life in enumerate(self._lives)
            if life.text and not life.finished and life.silent_for >= seconds
        ]

    def behind(self, step: int) -> list[Straggler]:
        """Return the ranks that have begun fewer than ``step`` steps and have not finished."""
        return [self._row(rank) for rank, life in enumerate(self._lives) if life.step < step and not life.finished]

    def furthest(self) -> int:
        """Return the largest number of steps begun by any rank."""
        return max(life.step for life in self._lives)

    def _row(self, rank: int) -> Straggler:
        life = self._lives[rank]
        return Straggler(rank, life.host, life.step, life.silent_for)
