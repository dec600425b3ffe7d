"""Keeps SIGUSR1 from ending a process that is still setting up: it is noted, and counts once training begins."""

from __future__ import annotations

import signal
import threading
from typing import Any

_noted: list[int] = []


def listen() -> None:
    """Note SIGUSR1 instead of ending, if nobody handles it yet; nothing happens outside of the main thread."""
    wanted = getattr(signal, "SIGUSR1", None)
    if wanted is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(wanted) == signal.SIG_DFL:
        signal.signal(wanted, _note)


def take() -> list[int]:
    """Give the signal back, and return what was noted since `listen`; nothing a second time."""
    wanted = getattr(signal, "SIGUSR1", None)
    if wanted is not None and signal.getsignal(wanted) is _note:
        signal.signal(wanted, signal.SIG_DFL)
    came = list(_noted)
    _noted.clear()
    return came


def _note(signum: int, frame: Any) -> None:
    _noted.append(signum)
