"""Ends a process whose main thread no longer reacts, for example because it is blocked in a collective."""

import ctypes
import faulthandler
import os
import threading
import time
from collections.abc import Callable

_LOCAL_FACTOR = 1.5


class _MainThreadProbe:
    """Asks the main thread for a sign, which it gives between two bytecodes, so not while it is blocked in C++.

    Looking at its stack from another thread cannot tell: a loop gives up the interpreter lock at the same place each
    time, and so looks as if it stood still.
    """

    def __init__(self) -> None:
        self._asked = False
        self._signs = 0

    def moved(self) -> bool:
        """Return whether the main thread has answered since the last call, and ask again if it has."""
        moved = self._asked and _answers.count > self._signs
        if moved or not self._asked:
            self._signs = _answers.count
            # One question at a time: the interpreter's queue is short. If it is full, ask next time.
            self._asked = ctypes.pythonapi.Py_AddPendingCall(_answers.callback, None) == 0
        return moved


class _Answers:
    """Counts the main thread's answers. It lives for ever: the interpreter only borrows the callback."""

    def __init__(self) -> None:
        self.count = 0
        self.callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._answer)

    def _answer(self, _: object) -> int:
        self.count += 1
        return 0


_answers = _Answers()


class ExitGuard:
    """A thread that makes no store call, so that it still works when the store does not answer.

    Once a remote failure is known, the process has ``grace`` seconds to call :meth:`disarm`; then the failure and the
    Python stacks of all threads are written to stderr and the process ends with ``exit_code``.

    A failure of this rank itself needs less force: its exception is on its way up already, and ending the process early
    could cut off the user's own clean-up or an emergency checkpoint. So after a local failure the limit is 1.5 times
    ``grace``, it starts again whenever the main thread runs Python code, and it holds only if other ranks had not
    finished when the failure happened, since nobody waits for the last one.

    Time spent suspended (SIGSTOP, a closed laptop) does not count.

    Args:
        interval: Seconds between two looks.
        grace: Seconds, see above.
        exit_code: Exit code of the ended process.
        store_timeout: Seconds that one round of store calls may take.
        on_store_silent: Called once if a round of store calls takes longer than ``store_timeout``.
        on_end: Called with the reason right before the process ends; must not block for long.
    """

    def __init__(
        self,
        *,
        interval: float,
        grace: float,
        exit_code: int,
        store_timeout: float,
        on_store_silent: Callable[[], None],
        on_end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._interval = interval
        self._grace = grace
        self._exit_code = exit_code
        self._store_timeout = store_timeout
        self._on_store_silent = on_store_silent
        self._on_end = on_end
        self._off = threading.Event()
        self._reason: str | None = None
        self._local = False
        self._round = 0  # number of the round of store calls in progress, or 0
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="lightning-sync-guard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def arm(self, reason: str, *, local: bool) -> None:
        """Start the countdown, for the ``reason`` to be written to stderr; ``local`` if the failure is this rank's."""
        self._local = local
        self._reason = reason

    def disarm(self) -> None:
        """Cancel everything, for good."""
        self._off.set()

    def round_begins(self) -> None:
        """Note that store calls are being made."""
        self._rounds += 1
        self._round = self._rounds

    def round_ends(self) -> None:
        """Note that the store has answered."""
        self._round = 0

    def _run(self) -> None:
        armed_for = silent_for = 0.0
        round_before = 0
        probe = _MainThreadProbe()
        last = time.monotonic()
        while not self._off.wait(self._interval):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self._interval), now

            if self._round == 0 or self._round != round_before:
                round_before, silent_for = self._round, 0.0
            else:
                silent_for += passed
                if silent_for >= self._store_timeout and self._reason is None:
                    self._on_store_silent()

            if self._reason is None:
                continue
            armed_for += passed
            limit = self._grace
            if self._local:
                limit *= _LOCAL_FACTOR
                if probe.moved():
                    armed_for = 0.0
            if armed_for >= limit and not self._off.is_set():
                self._end(armed_for)

    def _end(self, waited: float) -> None:
        text = (
            f"\nlightning_sync: this process ends with exit code {self._exit_code}, because the run has failed and "
            f"its main thread did not react within {waited:.1f} s.\n{self._reason}\n\nStacks of all threads:\n"
        )
        # Neither Python's buffers nor its locks: a blocked thread may hold them.
        os.write(2, text.encode("utf-8", "replace"))
        faulthandler.dump_traceback(file=2, all_threads=True)
        self._on_end(text.partition("\n\nStacks")[0])
        os._exit(self._exit_code)
