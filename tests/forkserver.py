"""Starts the ranks of tests as forks of one process that has imported torch and Lightning once.

A fresh interpreter spends some five seconds of a core on these imports, far more than most tests need for the rest. The
server has one thread and has used neither random numbers nor sockets, so what a fork finds is what a fresh interpreter
would have made. It starts with the first rank and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

_PRELOADED = ("numpy", "torch", "torch.distributed", "lightning.pytorch", "pytest", "hypothesis", "tests.models")
_LENGTH = 8


class Forked:
    """A process of the server: what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], log: IO[bytes]) -> None:
        """Run `tests.workers` with these arguments; stdout and stderr go to `log`, stdin is a pipe."""
        theirs, ours = os.pipe()
        self._status, status = os.pipe()
        request = {"arguments": arguments, "env": dict(env), "folder": os.getcwd()}
        _send(_server(), json.dumps(request).encode(), [theirs, log.fileno(), status])
        os.close(theirs)
        os.close(status)
        self.stdin = os.fdopen(ours, "wb")
        self.returncode: int | None = None
        self.pid = self._read()

    def poll(self) -> int | None:
        """The exit code, negative after a signal; `None` while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self) -> int:
        """Wait for the exit code."""
        if self.returncode is None:
            self._end()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = self._read()
        os.close(self._status)

    def _read(self) -> int:
        text = os.read(self._status, _LENGTH)
        if len(text) < _LENGTH:
            raise RuntimeError("the fork server of the tests has died")
        return int(text)


_control: socket.socket | None = None


def _server() -> socket.socket:
    global _control
    if _control is None:
        _control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())],
            cwd=Path(__file__).resolve().parent.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(process.wait)
        atexit.register(_control.close)  # runs first, and ends the server
    return _control


def _send(control: socket.socket, text: bytes, descriptors: list[int]) -> None:
    socket.send_fds(control, [f"{len(text):{_LENGTH}}".encode()], descriptors)
    control.sendall(text)


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(control, _LENGTH, 3)
    if not head:
        return None
    text = b""
    while len(text) < int(head):
        text += control.recv(int(head) - len(text))
    return json.loads(text), descriptors


def _serve(control: socket.socket) -> int:
    """Fork for every request, and write to its pipe: the process id, then the exit code."""
    children: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    _tell(children.pop(pid), os.waitstatus_to_exitcode(status))
        if control in ready:
            received = _receive(control)
            if received is None:
                return 0
            request, (stdin, log, status) = received
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (control.fileno(), woken, wake, status, *children.values()):
                    os.close(descriptor)
                _become(request, stdin, log)
            os.close(stdin)
            os.close(log)
            os.write(status, f"{pid:{_LENGTH}}".encode())
            children[pid] = status


def _tell(status: int, code: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, f"{code:{_LENGTH}}".encode())
    os.close(status)


def _become(request: dict[str, Any], stdin: int, log: int) -> NoReturn:
    """Be the rank of a test: what a fresh interpreter would have of its own is made here."""
    import numpy as np

    from tests import workers

    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.path[:] = list(dict.fromkeys([*request["env"].get("PYTHONPATH", "").split(os.pathsep), *sys.path]))
    random.seed()
    np.random.seed()
    faulthandler.enable()
    try:
        code = workers.main(request["arguments"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    # What a test may notice of an interpreter's end, without taking half a gigabyte of modules apart, every page of
    # which would be copied first.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import importlib

    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page that holds an object
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1]))))
