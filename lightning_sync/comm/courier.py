"""The background thread that carries a rank's notices to the store and brings the others' notices back."""

import logging
import threading
import time
from collections.abc import Callable

from lightning_sync.comm.agreement import StopAgreement
from lightning_sync.comm.board import Board
from lightning_sync.comm.failure import FailureRecord, RemoteFailure
from lightning_sync.comm.heartbeat import LifeTable, Straggler, encode_beat
from lightning_sync.comm.last_resort import ExitGuard
from lightning_sync.comm.process import State, identity, state_of
from lightning_sync.comm.progress import SETUP, Place, StepClock, explain_missing, who_is_missing
from lightning_sync.comm.stacks import StackFile

_log = logging.getLogger(__name__)

_HURRY = 0.02
_TIMED_OUT = "TimeoutError"
_SILENT = 10.0
_RANKS_PER_LOOK = 32


class Courier:
    """Makes all store calls of one rank, on one thread.

    Other threads leave work in its attributes and call :meth:`wake`; what it finds out, they read from its attributes.

    Args:
        board: The run's notice board; belongs to this thread from now on.
        rank: This rank.
        world_size: Number of ranks.
        host: This rank's host name.
        interval: Seconds between two rounds.
        lost_after: Seconds of silence after which another rank counts as failed, or None.
        agreement: This rank's part in the stop agreement.
        guard: Armed when the first failure is seen.
        clock: How long this rank's step takes, or None: as long as it likes.
        stacks: Where this rank's stacks go when a rank is missing.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        *,
        host: str,
        interval: float,
        lost_after: float | None,
        agreement: StopAgreement,
        guard: ExitGuard,
        clock: StepClock | None = None,
        stacks: StackFile,
    ) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._interval = interval
        self._lost_after = lost_after
        self._agreement = agreement
        self._guard = guard
        self._clock = clock
        self._stacks = stacks
        self.place: Place = SETUP  # set by the main thread: a plain attribute, no lock
        self.rounds: Callable[[], int] = lambda: 0  # collectives begun so far, where somebody counts them
        self.beat_every = 2 * interval
        # Every rank reads every beat: in larger runs less often, so that the store's load grows with N, not with N^2.
        self._look_every = self.beat_every * -(-world_size // _RANKS_PER_LOOK)
        self.silence = 2.5 * self._look_every  # seconds without a sign of life that make a rank suspect
        self.lives = LifeTable(world_size, longest_gap=2 * self._look_every)

        self.stop_request: str | None = None  # set by signal handlers: a plain attribute, no lock
        self.stop_reason: str | None = None
        self.suspect_until = 0.0
        self.counts: dict[int, int] = {}
        self.failed = threading.Event()
        self.failure: RemoteFailure | None = None
        self.remote = False
        self._report: FailureRecord | None = None
        self._callbacks: list[Callable[[RemoteFailure], None]] = []
        self._lock = threading.Lock()  # guards the four above

        self._wake = threading.Event()
        self._closing = False
        self._linger_until = 0.0
        self._news = 0
        self._request_sent = False
        self._count_sent = False
        self._left = False
        self._heard: set[int] = set()
        self._processes: dict[int, str] = {}
        self._beats = 0
        self._next_beat = 0.0
        self._next_look = 0.0
        self._last_look = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lightning-sync-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Do a round soon. Not for signal handlers: an Event's lock can be held by the thread they interrupt."""
        self._wake.set()

    def report(self, record: FailureRecord, wait: float) -> None:
        """Publish this rank's failure; return when that is done, after ``wait`` seconds at most."""
        with self._lock:
            if self._report is None:
                self._report = record
        self.wake()
        if not self.failed.wait(wait if self._thread.is_alive() else 0):
            # The store does not answer: this rank at least knows its own failure.
            self.see(record)

    def see(self, record: FailureRecord) -> None:
        """Take note of the run's first failure; later ones are dropped."""
        # Only what this rank has reported itself is on its way up on its main thread.
        remote = record.reporter != self._rank or record.rank != self._rank or self._report is None
        about_absence = record.reporter != record.rank or (remote and record.rank == self._rank)
        with self._lock:
            if self.failure is not None:
                return
            failure = self.failure = RemoteFailure(record)
            self.remote = remote
            callbacks, self._callbacks = self._callbacks, []
        if about_absence or record.type_name == _TIMED_OUT:
            self._stacks.dump(str(failure))
        others = [other for other in range(self._world_size) if other != self._rank]
        if remote or not all(self.lives.finished(other) for other in others):
            self._guard.arm(str(failure), local=not remote)
        self.failed.set()
        for callback in callbacks if remote else ():
            try:
                callback(failure)
            except Exception:
                _log.exception("a callback for the failure of rank %d failed", record.rank)

    def add_callback(self, callback: Callable[[RemoteFailure], None]) -> None:
        """Call back when another rank's failure is first seen, or now if that has happened."""
        with self._lock:
            seen = self.failure if self.remote else None
            if seen is None:
                self._callbacks.append(callback)
        if seen is not None:
            callback(seen)

    def lose_store(self, what: str, type_name: str) -> None:
        """Take note that the store is out of reach, which nobody can publish."""
        row = self.lives.row(0)
        message = f"rank 0's host, which keeps the store, is gone: {what}"
        self.see(FailureRecord(0, row.host, row.step, row.phase, type_name, message, traceback_text="", reporter=-1))

    def silent(self) -> list[Straggler]:
        """Return the other unfinished ranks that have missed two signs of life."""
        return self._silent_for(self.silence)

    def close(self, linger: float, patience: float) -> None:
        """Publish what is left and end the thread; see :meth:`Watcher.close`."""
        self._linger_until = time.monotonic() + linger
        self._closing = True
        self.wake()
        self._thread.join(linger + patience)

    def _run(self) -> None:
        try:
            while True:
                self._guard.round_begins()
                last = self._round()
                self._guard.round_ends()
                if last:
                    return
                undecided = self._agreement.frozen and self._agreement.stop_at is None
                self._wake.wait(_HURRY if undecided or self._closing else self._interval)
                self._wake.clear()
        except RuntimeError as error:  # what torch's stores raise
            if self._report is not None:
                self.see(self._report)
            elif not (self._agreement.finished or self._closing):
                kind = type(error)
                self.lose_store(str(error).partition("\n")[0], f"{kind.__module__}.{kind.__qualname__}")
        except Exception as error:
            _log.exception("the watcher of rank %d cannot go on", self._rank)
            step, where = self._agreement.count, "the watcher"
            self.see(FailureRecord.of(error, self._rank, self._host, step, where, reporter=-1))
        finally:
            self._guard.round_ends()

    def _round(self) -> bool:
        """Do one round of store calls; return whether it was the last one."""
        closing = self._closing
        board, agreement = self._board, self._agreement
        if self._report is not None and not self.failed.is_set():
            self._claim(self._report)
        if self.stop_request is not None and not self._request_sent:
            board.claim("stop", f"{self.stop_request} on rank {self._rank} (host {self._host})")
            self._request_sent = True
        news = board.news()
        if news != self._news:
            self._read_news()
            self._news = news
        now = time.monotonic()
        if self._clock is not None:
            self._watch_step(self._clock, now)
        committed = agreement.published
        if committed is not None and not self._count_sent:
            board.post(f"count/{self._rank}", str(committed))
            self._count_sent = True
        if now >= self._next_beat or closing:
            if self._beats == 0:
                board.put(f"process/{self._rank}", identity())
            self._next_beat = now + self.beat_every
            self._beats += 1
            board.put(f"beat/{self._rank}", self._beat())
        if now >= self._next_look or now < self.suspect_until:
            self._look(now)
        if not self._left and (closing or agreement.finished or self.failed.is_set()):
            board.add("left", 1)
            self._left = True
        return closing and self._may_go()

    def _read_news(self) -> None:
        board, agreement = self._board, self._agreement
        if not self.failed.is_set() and board.has("failure"):
            self.see(FailureRecord.from_json(board.read("failure")))
        if not agreement.frozen and board.has("stop"):
            self.stop_reason = board.read("stop")
            agreement.freeze()
        if agreement.frozen and len(self.counts) < self._world_size:
            for rank in range(self._world_size):
                if rank not in self.counts and board.has(f"count/{rank}"):
                    self.counts[rank] = int(board.read(f"count/{rank}"))
            if len(self.counts) == self._world_size:
                agreement.decide(self.counts.values())

    def _look(self, now: float) -> None:
        board = self._board
        self._next_look = now + self._look_every
        if len(self._heard) < self._world_size:
            unheard = [rank for rank in range(self._world_size) if rank not in self._heard]
            self._heard.update(rank for rank in unheard if board.has(f"beat/{rank}"))
            for rank in self._heard - self._processes.keys():
                self._processes[rank] = board.read(f"process/{rank}")  # written before the first beat
        self._read_beats()
        if self.failed.is_set() or self._closing:
            return
        lost = self._gone()
        if lost:
            # What it said at last was written before it ended: that it has finished, or why it failed.
            self._read_news()
            self._read_beats()
            lost = [] if self.failed.is_set() else self._gone()
        if not lost and now < self.suspect_until:
            lost = self.silent()
        if not lost and self._lost_after is not None:
            lost = self._silent_for(self._lost_after)
        if lost:
            self._claim_missing(lost[0], "ConnectionError", f"no sign of life for {lost[0].silent_for:.1f} s")

    def _read_beats(self) -> None:
        ranks, now = sorted(self._heard), time.monotonic()
        texts = self._board.read_all([f"beat/{rank}" for rank in ranks])
        self.lives.observe(dict(zip(ranks, texts, strict=True)), now - self._last_look)
        self._last_look = now

    def _gone(self) -> list[Straggler]:
        """The other unfinished ranks of this machine whose process has ended."""
        rows = [row for row in self.lives.unfinished() if row.rank != self._rank and row.rank in self._processes]
        return [row for row in rows if self._state_of(row.rank) == "gone"]

    def _watch_step(self, clock: StepClock, now: float) -> None:
        """Count the time of this rank's step; if it is over, find out which rank is missing."""
        if self.failed.is_set() or self._closing or self._agreement.finished:
            return
        step, place = self._agreement.count, self.place
        others = (row for row in self.lives.unfinished() if row.rank != self._rank)
        waiting = place.waiting and any(row.phase != place.phase for row in others)
        clock.tick(now, step, place.paused or waiting or self.lives.pausing(self._rank, step))
        if clock.percent < 100:
            return
        self._look(now)
        own = Straggler(
            self._rank, self._host, step, 0.0, place.phase, place.order, self.rounds(), clock.percent, place.paused
        )
        rows = [own if row.rank == self._rank else row for row in self.lives.unfinished()]
        missing = who_is_missing(rows, max(self.silence, min(_SILENT, clock.limit / 4)))
        if not self.failed.is_set():
            self._claim_missing(missing[0], _TIMED_OUT, explain_missing(missing, rows, clock.limit))

    def _claim_missing(self, row: Straggler, type_name: str, message: str) -> None:
        state = "running" if row.rank == self._rank else self._state_of(row.rank)
        if state == "unknown" and row.silent_for < self.silence:
            state = "running"
        message += {
            "running": "",
            "gone": ". Its process is gone: it was killed",
            "stopped": ". Its process is stopped (SIGSTOP or a debugger), so its own stack cannot be written",
            "unknown": ". Its process was killed or is stopped, or its host is out of reach",
        }[state]
        if self._stacks.path is not None:
            message += f". Python stacks of the ranks that can write theirs: {self._stacks.path.parent}"
        self._claim(FailureRecord(row.rank, row.host, row.step, row.phase, type_name, message, "", self._rank))

    def _state_of(self, rank: int) -> State:
        return state_of(self._processes[rank]) if rank in self._processes else "unknown"

    def _beat(self) -> str:
        agreement, place = self._agreement, self.place
        return encode_beat(
            self._beats,
            agreement.count,
            agreement.finished,
            self._host,
            phase=place.phase,
            order=place.order,
            rounds=self.rounds(),
            percent=0 if self._clock is None else self._clock.percent,
            paused=place.paused,
        )

    def _silent_for(self, seconds: float) -> list[Straggler]:
        return [row for row in self.lives.silent(seconds) if row.rank != self._rank]

    def _claim(self, record: FailureRecord) -> None:
        self.see(FailureRecord.from_json(self._board.claim("failure", record.to_json())))

    def _may_go(self) -> bool:
        if time.monotonic() >= self._linger_until:
            return True
        absent = {row.rank for row in self.silent() + self._gone()}
        return self._board.add("left", 0) >= self._world_size - len(absent)
