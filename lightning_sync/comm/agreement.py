"""How ranks agree to stop after the same number of steps, without a collective.

Each rank counts the steps it has begun. When a stop is wanted, every rank freezes: it publishes its count and begins no
further step until the counts of all ranks are known. All then go on to S, the largest count, and stop there.

Why ranks in lock-step cannot deadlock: the count is published by a background thread, so a rank that is blocked inside
a step publishes too, and the decision never waits for a main thread. If rank B sits inside step n+1, which needs rank
A, then B's count is at least n+1, so S is at least n+1, and A, once it knows S, begins step n+1. No rank is past S
already, because S is at least every published count, and no count grows between its publication and the decision.
"""

import threading
from collections.abc import Iterable


class StopAgreement:
    """One rank's part in the agreement. It knows no store: the watcher carries the counts.

    Args:
        lock_step: True (default) stops all ranks after the same number of steps. False stops each rank at its own next
            boundary, for modes in which ranks are not in step with one another.
    """

    def __init__(self, *, lock_step: bool = True) -> None:
        self._lock_step = lock_step
        # Taken by the main thread and by the watcher's thread, never by a signal handler.
        self._lock = threading.Lock()
        self._count = 0
        self._published: int | None = None
        self._frozen = False
        self._finished = False
        self._stop_at: int | None = None
        self.decided = threading.Event()

    @property
    def count(self) -> int:
        """Steps begun on this rank."""
        return self._count

    @property
    def published(self) -> int | None:
        """The count that this rank has committed to, or None as long as it has not."""
        return self._published

    @property
    def frozen(self) -> bool:
        """Whether a stop is wanted somewhere."""
        return self._frozen

    @property
    def finished(self) -> bool:
        """Whether this rank has run out of steps."""
        return self._finished

    @property
    def stop_at(self) -> int | None:
        """Number of steps after which all stop, or None as long as that is not decided."""
        return self._stop_at

    def try_begin(self) -> bool | None:
        """Begin a step if that is allowed.

        Returns:
            True if a step was begun (and counted), False if this rank must stop here, None if that is not decided yet.

        Raises:
            RuntimeError: If this rank has finished.
        """
        # A plain lock: 0.1 microseconds, and no argument about memory order is needed.
        with self._lock:
            if self._finished:
                raise RuntimeError("a step was begun after finish(); a finished rank needs a new Watcher")
            if self._frozen:
                if self._stop_at is None:
                    return None
                if self._count >= self._stop_at:
                    return False
            self._count += 1
            return True

    def freeze(self) -> int:
        """Begin no further step before the decision; return the count to publish."""
        with self._lock:
            self._frozen = True
            if not self._lock_step and self._stop_at is None:
                self._stop_at = self._count
            return self._commit()

    def finish(self) -> int:
        """Note that this rank has run out of steps; return the count to publish."""
        with self._lock:
            self._finished = True
            return self._commit()

    def decide(self, counts: Iterable[int]) -> None:
        """Set the step to stop at from the published counts of all ranks."""
        with self._lock:
            if self._stop_at is None:
                self._stop_at = max(counts)
        self.decided.set()

    def _commit(self) -> int:
        # The first value stays: other ranks may have decided on it already.
        if self._published is None:
            self._published = self._count
        return self._published
