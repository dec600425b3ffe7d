"""How many steps lie between two exchanges: fixed, growing, by the learning rate, or by the clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lightning_sync.checks import check_integer, check_positive


@dataclass(frozen=True)
class Progress:
    """What a period may depend on.

    Attributes:
        exchanges: Exchanges finished so far.
        learning_rate: The inner optimiser's now.
        seconds_per_step: Mean time of a step since the last exchange; 0 before the first.
    """

    exchanges: int
    learning_rate: float
    seconds_per_step: float


class Period(ABC):
    """Steps between two exchanges.

    Every rank proposes what `length` returns, and the largest proposal counts, agreed in the exchange before: clocks
    and measured times differ between ranks, the period must not.
    """

    fixed: ClassVar[bool] = False

    @abstractmethod
    def length(self, progress: Progress) -> int:
        """Steps until the next exchange, at least 1."""


@dataclass(frozen=True)
class Every(Period):
    """Always the same number of steps.

    Args:
        steps: H. More steps send less and let replicas drift apart further.
    """

    steps: int
    fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("Every", 1, steps=self.steps)

    def length(self, progress: Progress) -> int:
        """`steps`."""
        return self.steps


@dataclass(frozen=True)
class Growing(Period):
    r"""Short periods first, then longer: :math:`H_k = \min(limit, start \cdot factor^{\lfloor k/every \rfloor})`.

    Early on parameters move fast and replicas drift apart quickly; later long periods cost little.

    Args:
        start: Steps of the first period.
        factor: Growth, above 1.
        every: Exchanges between two growths.
        limit: Longest period.
    """

    start: int = 1
    factor: float = 2.0
    every: int = 20
    limit: int = 64

    def __post_init__(self) -> None:
        check_integer("Growing", 1, start=self.start, every=self.every, limit=self.limit)
        check_positive("Growing", factor=self.factor)
        if self.factor <= 1 or self.limit < self.start:
            raise ValueError(f"{self!r}: factor must be above 1 and limit at least start.")

    def length(self, progress: Progress) -> int:
        """The period after `progress.exchanges` exchanges."""
        growths = min(progress.exchanges // self.every, 1000)
        grown = self.start
        for _ in range(growths):
            grown = min(self.limit, max(grown + 1, int(grown * self.factor)))
            if grown == self.limit:
                break
        return grown


@dataclass(frozen=True)
class QuadraticRule(Period):
    r"""Lengthen the period as the learning rate decays: :math:`H = \max(base, \lfloor (coefficient / \eta)^2 \rfloor)`.

    (Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning", equation 2.)

    Args:
        base: Shortest period.
        coefficient: In units of the learning rate; larger means longer periods.
        limit: Longest period; the rule has none, but a learning rate near zero would end all exchanges.
    """

    base: int = 4
    coefficient: float = 0.01
    limit: int = 1024

    def __post_init__(self) -> None:
        check_integer("QuadraticRule", 1, base=self.base, limit=self.limit)
        check_positive("QuadraticRule", coefficient=self.coefficient)

    def length(self, progress: Progress) -> int:
        """The period at `progress.learning_rate`."""
        if progress.learning_rate <= 0:
            return self.limit
        return max(self.base, int(min(float(self.limit), (self.coefficient / progress.learning_rate) ** 2)))


@dataclass(frozen=True)
class Seconds(Period):
    """So many steps as take about this time, measured over the period before.

    Args:
        seconds: Time between two exchanges. The slowest rank's number of steps would be smaller; the largest proposal
            counts, so no rank exchanges more often than asked.
        first: Steps of the first period, when nothing has been measured.
    """

    seconds: float
    first: int = 8

    def __post_init__(self) -> None:
        check_positive("Seconds", seconds=self.seconds)
        check_integer("Seconds", 1, first=self.first)

    def length(self, progress: Progress) -> int:
        """Steps that fit into `seconds`."""
        if progress.seconds_per_step <= 0:
            return self.first
        return max(1, round(self.seconds / progress.seconds_per_step))


def as_period(sync_every: int | Period | None, seconds: float | None = None, default: int = 16) -> Period:
    """The period that ``sync_every`` and ``sync_every_seconds`` mean; `default` steps if both are `None`.

    Raises:
        ValueError: for both at once, or a `sync_every` that is neither a `Period` nor an integer of at least 1.
    """
    if seconds is not None and sync_every is not None:
        raise ValueError(
            f"sync_every={sync_every!r} and sync_every_seconds={seconds!r} both say when to exchange. Leave one None."
        )
    if seconds is not None:
        return Seconds(seconds)
    if sync_every is None:
        return Every(default)
    if isinstance(sync_every, Period):
        return sync_every
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(
            f"sync_every={sync_every!r}: expected a number of steps of at least 1, or a Period such as Growing()."
        )
    return Every(sync_every)
