"""How long a step takes, for periods that are given in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Seconds per step since the last mark, without pauses.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = 0
        self._since = clock()
        self._paused: float | None = None

    def mark(self, step: int) -> None:
        """Count from here."""
        self._step, self._since = step, self._clock()
        if self._paused is not None:
            self._paused = self._since

    def pause(self) -> None:
        """Leave out the time from now on, such as that of a validation."""
        self._paused = self._clock()

    def go_on(self) -> None:
        """End a pause."""
        if self._paused is not None:
            self._since += self._clock() - self._paused
            self._paused = None

    def seconds(self, step: int) -> float:
        """Mean seconds of the steps since the mark; 0 if there was none."""
        passed = step - self._step
        return (self._clock() - self._since) / passed if passed > 0 else 0.0
