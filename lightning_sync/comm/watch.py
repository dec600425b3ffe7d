"""Watches a run from the background: failures reach every rank, and a stop is agreed, without per-step communication.

The main thread reads attributes; a background thread talks to the store. When nothing happens it makes one store call
per ``interval`` and two more per sign of life.
"""

import atexit
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from lightning_sync.comm.agreement import StopAgreement
from lightning_sync.comm.board import Board
from lightning_sync.comm.courier import Courier
from lightning_sync.comm.failure import FailureRecord, RemoteFailure
from lightning_sync.comm.heartbeat import Straggler
from lightning_sync.comm.last_resort import ExitGuard
from lightning_sync.comm.progress import DATA, Place, StepClock
from lightning_sync.comm.stacks import StackFile

_PUBLISH_WAIT = 2.0


class Watcher:
    """Carries failures, stop requests and signs of life between the ranks of one run.

    Every rank makes one, with the same arguments, before the first step, and closes it in its teardown (the
    interpreter's exit closes it too). Whoever catches an exception of this rank must call :meth:`report_failure`, or
    :meth:`explain` if it came out of a collective. A program that catches the exception and goes on must close
    first, else the process is ended (see ``grace``).

    Args:
        store: Any torch store that all ranks share. It is cloned, so the caller's connection is left alone.
        rank: This rank, from 0.
        world_size: Number of ranks.
        prefix: Keys of this run start with it. It must differ between runs that use one store, for example
            ``"fit-3"``, else a run sees the failures of an earlier one.
        interval: Seconds between two looks at the store.
        grace: Seconds that a process has to close after another rank's failure was seen. Then it is ended, because its
            main thread is blocked. After its own failure a rank has longer, see :class:`ExitGuard`.
        exit_code: Exit code of a process ended that way.
        lock_step: Whether all ranks stop after the same number of steps (default), or each before its next one.
        stop_timeout: Seconds that ``begin_step`` waits for the other ranks' answer to a stop request.
        store_timeout: Seconds without an answer after which the store's host counts as gone. A closed connection counts
            at once; this is for a host that lost power or its network.
        lost_after: Seconds of silence after which another rank counts as failed; None (default) never. A process
            that holds Python's interpreter lock for that long (some extensions do) would be taken for dead. A process
            that was killed is found out in seconds whatever this is, by the ranks of its machine (Linux) or when it is
            missed in a collective (see :meth:`explain`).
        step_timeout: Seconds from one ``begin_step`` to the next after which the run fails with the names of the ranks
            that hold it up; None (default) never. Time does not count while any rank's :attr:`place` is a paused one.
        first_timeout: The same for the first step, in which kernels are compiled and data workers start; never less
            than ``step_timeout``.
        stacks: Folder for the Python stacks that every rank writes (``rank-N.txt``) when a rank is missing or before
            the process is ended; None (default): to stderr only, and only in the latter case.

    Raises:
        ValueError: If a number is out of range or the prefix is empty.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        prefix: str,
        interval: float = 0.5,
        grace: float = 5.0,
        exit_code: int = 70,
        lock_step: bool = True,
        stop_timeout: float = 60.0,
        store_timeout: float = 10.0,
        lost_after: float | None = None,
        step_timeout: float | None = None,
        first_timeout: float = 1800.0,
        stacks: Path | None = None,
    ) -> None:
        if not prefix:
            raise ValueError("prefix is empty; give each run its own, for example prefix='fit-0'")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be from 0 to world_size - 1 (world_size={world_size})")
        if not 1 <= exit_code <= 255:
            raise ValueError(f"exit_code={exit_code} must be from 1 to 255")
        seconds = {
            "interval": interval,
            "grace": grace,
            "stop_timeout": stop_timeout,
            "store_timeout": store_timeout,
            "lost_after": lost_after,
            "step_timeout": step_timeout,
            "first_timeout": first_timeout,
        }
        for name, value in seconds.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be a number of seconds above 0")
        self._rank = rank
        self._world_size = world_size
        self._interval = interval
        self._grace = grace
        self._stop_timeout = stop_timeout
        self._host = socket.gethostname()
        self._pid = os.getpid()
        self._closed = False
        self._agreement = StopAgreement(lock_step=lock_step)
        stack_file = StackFile(stacks, rank)
        self._guard = ExitGuard(
            interval=min(interval, grace / 4),
            grace=grace,
            exit_code=exit_code,
            store_timeout=store_timeout,
            on_store_silent=lambda: self._courier.lose_store(f"no answer for {store_timeout:g} s", "TimeoutError"),
            on_end=stack_file.dump,
        )
        self._courier = Courier(
            Board(store, prefix),
            rank,
            world_size,
            host=self._host,
            interval=interval,
            lost_after=lost_after,
            agreement=self._agreement,
            guard=self._guard,
            clock=None if step_timeout is None else StepClock(step_timeout, first_timeout, 4 * interval),
            stacks=stack_file,
        )
        self._guard.start()
        self._courier.start()
        atexit.register(self.close)

    @property
    def failure(self) -> RemoteFailure | None:
        """The run's first failure, of whichever rank; None as long as there is none."""
        return self._courier.failure

    def check(self) -> None:
        """Raise the run's failure if it is not this rank's own. Costs an attribute read."""
        if self._courier.remote and self._courier.failure is not None:
            raise RemoteFailure(self._courier.failure.record)

    def report_failure(self, error: BaseException, where: str) -> None:
        """Tell all ranks that this one has failed. The first failure of the run is kept, later ones are dropped.

        May be called from any thread, never raises, and returns when the failure is published, after 2 s at most.

        Args:
            error: The exception.
            where: What this rank was doing, for example ``"training_step"``.
        """
        record = FailureRecord.of(error, self._rank, self._host, self.steps, where)
        self._courier.report(record, _PUBLISH_WAIT)

    def explain(self, error: BaseException, where: str) -> RemoteFailure:
        """Find out which rank an error out of a collective is really about, and report it.

        When a rank dies, its peers see only a closed connection. This waits for the dead rank's own report, or, if it
        was killed and said nothing, for its signs of life to stop: at most 8 times ``interval`` (4 s), in runs of more
        than 32 ranks longer. If neither comes, the error is reported as this rank's own.

        Args:
            error: The exception out of the collective.
            where: What this rank was doing.

        Returns:
            The run's failure, to be raised ``from`` the error.
        """
        courier = self._courier
        patience = courier.silence + self._interval * 3
        courier.suspect_until = time.monotonic() + patience
        courier.wake()
        if not courier.failed.wait(patience):
            gone = [r for r in range(self._world_size) if r != self._rank and courier.lives.finished(r)]
            if gone:
                error = RuntimeError(
                    f"ranks {gone} have finished and left, while this one is at step {self.steps}: they had fewer "
                    "batches. Give every rank the same number (Lightning's DistributedSampler does)."
                )
            self.report_failure(error, where)
        failure = courier.failure
        record = (
            FailureRecord.of(error, self._rank, self._host, self.steps, where) if failure is None else failure.record
        )
        return RemoteFailure(record)

    def on_failure(self, callback: Callable[[RemoteFailure], None]) -> None:
        """Call ``callback`` with the failure when another rank's failure is first seen; at once if it has been.

        It runs on a background thread, must be short and must not block. An exception in it is logged.
        """
        self._courier.add_callback(callback)

    @property
    def place(self) -> Place:
        """What the main thread does, for the messages about missing ranks; setting it costs an attribute write."""
        return self._courier.place

    @place.setter
    def place(self, place: Place) -> None:
        self._courier.place = place

    @contextmanager
    def at(self, place: Place) -> Generator[None, None, None]:
        """Be at ``place`` for a while, then where this rank was before."""
        before, self._courier.place = self._courier.place, place
        yield
        self._courier.place = before  # not after an exception: that is where this rank failed

    def count_rounds(self, rounds: Callable[[], int]) -> None:
        """Tell ranks of one step apart by ``rounds``, the number of collectives begun so far (any thread)."""
        self._courier.rounds = rounds

    @property
    def steps(self) -> int:
        """Steps that this rank has begun."""
        return self._agreement.count

    @property
    def stop_reason(self) -> str | None:
        """Why a stop was requested, with the rank that did; None as long as none was."""
        return self._courier.stop_reason

    @property
    def stop_at(self) -> int | None:
        """Number of steps after which all ranks stop; None as long as that is not agreed."""
        return self._agreement.stop_at

    def request_stop(self, reason: str = "a request") -> None:
        """Ask all ranks to stop. Safe in a signal handler: it sets one attribute and takes no lock.

        Args:
            reason: Why, for the log, for example ``"SIGTERM"``.
        """
        self._courier.stop_request = reason

    def begin_step(self) -> bool:
        """Call on the main thread of every rank before each step.

        Returns:
            True if all ranks must stop now, before this step; False if the step may run (it is counted).

        Raises:
            RemoteFailure: If another rank has failed.
            TimeoutError: If a stop was requested and a rank has not answered within ``stop_timeout``.
            RuntimeError: After :meth:`finish`.
        """
        if self._courier.remote:
            self.check()
        begun = self._agreement.try_begin()
        if begun is None:
            self._await_decision()
            begun = self._agreement.try_begin()
        if begun:
            self._courier.place = DATA
        return not begun

    def finish(self) -> None:
        """Say that this rank has run out of steps, so that no other rank waits for it when a stop is requested."""
        self._agreement.finish()
        self._courier.wake()

    def missing(self, steps: int) -> list[Straggler]:
        """Return the unfinished ranks last heard of before they had begun ``steps`` steps. Makes no store call."""
        return [row for row in self._courier.lives.behind(steps) if row.rank != self._rank or self.steps < steps]

    def stragglers(self) -> list[Straggler]:
        """Return the unfinished ranks that are behind the furthest one or have gone silent. Makes no store call.

        What is known of other ranks is up to 4 times ``interval`` old, and older in runs of more than 32 ranks.
        """
        rows = self.missing(max(self._courier.lives.furthest(), self.steps)) + self._courier.silent()
        return sorted({row.rank: row for row in rows}.values())

    def close(self) -> None:
        """Stop watching; cancels the forced exit. May be called twice.

        Rank 0 usually keeps the store, and its exit would look like a death to the others. So rank 0 waits, at most
        ``grace`` seconds, until every rank has finished or seen the failure. No other rank waits.
        """
        if self._closed or os.getpid() != self._pid:  # a forked child has the object, but not its threads
            return
        self._closed = True
        self._guard.disarm()
        self._agreement.finish()
        self._courier.close(linger=self._grace if self._rank == 0 else 0.0, patience=_PUBLISH_WAIT)
        atexit.unregister(self.close)

    def _await_decision(self) -> None:
        deadline = time.monotonic() + self._stop_timeout
        while not self._agreement.decided.wait(min(self._interval, 0.1)):
            self.check()
            if time.monotonic() > deadline:
                silent = [rank for rank in range(self._world_size) if rank not in self._courier.counts]
                raise TimeoutError(
                    f"a stop was requested ({self.stop_reason}), but ranks {silent} have not said within "
                    f"{self._stop_timeout:g} s how many steps they have begun; they are probably not running"
                )
