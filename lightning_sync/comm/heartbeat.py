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
        phase: What its main thread was doing then.
        order: The position of that phase within a step.
        rounds: Collectives that it had begun.
        percent: How much of the time for its step it had used up.
        paused: Whether it was in a phase that has no time limit.
    """

    rank: int
    host: str
    step: int
    silent_for: float
    phase: str = "?"
    order: int = 0
    rounds: int = 0
    percent: int = 0
    paused: bool = False

    @property
    def position(self) -> tuple[int, int, int]:
        """How far it was; smaller is behind."""
        return self.step, self.order, self.rounds

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (host {self.host}) at step {self.step} in {self.phase}, last heard of "
            f"{self.silent_for:.1f} s ago"
        )


@dataclass
class _Life:
    host: str = "?"
    step: int = 0
    finished: bool = False
    text: str = ""
    silent_for: float = 0.0
    phase: str = "?"
    order: int = 0
    rounds: int = 0
    percent: int = 0
    paused: bool = True


def encode_beat(
    number: int,
    step: int,
    finished: bool,
    host: str,
    *,
    phase: str = "?",
    order: int = 0,
    rounds: int = 0,
    percent: int = 0,
    paused: bool = False,
) -> str:
    """Return the text of one sign of life; ``number`` makes it differ from the one before. See `Straggler`."""
    numbers = f"{number} {step} {int(finished)} {order} {rounds} {percent} {int(paused)}"
    return f"{numbers} {host[:_HOST_LIMIT].replace(' ', '_')} {phase[:_HOST_LIMIT]}"


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
            parts = text.split(" ", 8)
            if text == life.text or len(parts) != 9 or not all(part.isdecimal() for part in parts[:7]):
                life.silent_for += min(elapsed, self._longest_gap)
                continue
            life.text, life.silent_for = text, 0.0
            _, life.step, finished, life.order, life.rounds, life.percent, paused = map(int, parts[:7])
            life.finished, life.paused, life.host, life.phase = finished == 1, paused == 1, parts[7], parts[8]

    def finished(self, rank: int) -> bool:
        """Return whether the rank said that it has run out of steps."""
        return self._lives[rank].finished

    def silent(self, seconds: float) -> list[Straggler]:
        """Return the ranks that were heard of once, have not finished, and said nothing new for ``seconds``."""
        return [
            self.row(rank)
            for rank, life in enumerate(self._lives)
            if life.text and not life.finished and life.silent_for >= seconds
        ]

    def behind(self, step: int) -> list[Straggler]:
        """Return the ranks that have begun fewer than ``step`` steps and have not finished."""
        return [self.row(rank) for rank, life in enumerate(self._lives) if life.step < step and not life.finished]

    def unfinished(self) -> list[Straggler]:
        """Return all ranks that have not finished."""
        return [self.row(rank) for rank, life in enumerate(self._lives) if not life.finished]

    def pausing(self, rank: int, step: int) -> bool:
        """Return whether another rank than ``rank``, which is at ``step``, does something that has no time limit.

        Never heard of counts as that, and so does the first step, for a rank that is past its own.
        """
        others = (life for other, life in enumerate(self._lives) if other != rank and not life.finished)
        return any(life.paused or life.step <= 1 < step for life in others)

    def furthest(self) -> int:
        """Return the largest number of steps begun by any rank."""
        return max(life.step for life in self._lives)

    def row(self, rank: int) -> Straggler:
        """Return what was last heard of a rank."""
        life = self._lives[rank]
        return Straggler(
            rank,
            life.host,
            life.step,
            life.silent_for,
            life.phase,
            life.order,
            life.rounds,
            life.percent,
            life.paused,
        )
