"""Runs a function in several processes: the base of all distributed tests.

    def body(rank, world_size, factor):            # top level of a test module
        t = torch.full((1,), float(rank)); dist.all_reduce(t); return t.item() * factor

    def test_sum():
        assert run_ranks(body, 3, 10) == [30.0, 30.0, 30.0]

Each rank is a process with one thread, on the loopback interface; see `forkserver` for how it starts. Nothing is left
behind: at the deadline the ranks that still run are killed by process id, and the error shows what each of them wrote
to stderr.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.forkserver import Forked

_ROOT = Path(__file__).resolve().parent.parent
_TAIL = 6_000


@dataclass
class RankOutcome:
    """How one rank ended.

    `exit_code` is 0 after a return, 1 after an exception, negative after a signal, None if it was killed at the
    deadline. `result` is what the function returned, `error` the traceback's last line ("ValueError: boom") if it
    raised, `seconds` the time from the start of all ranks to the end of this one.
    """

    rank: int
    exit_code: int | None
    result: Any
    error: str | None
    stderr: str
    seconds: float


class RankError(AssertionError):
    """A rank did not end as the test wanted; the text shows every rank's stderr."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` processes and return the results by rank.

    Raises RankError, with each failed rank's stderr, if a rank raises, dies or is not done at the deadline. Where a
    rank is meant to fail, use `launch_ranks`, which also explains the options.
    """
    outcomes = launch_ranks(fn, world_size, *args, **options)
    bad = [o for o in outcomes if o.exit_code != 0]
    if bad:
        raise RankError(_tell(f"{len(bad)} of {world_size} ranks of {fn.__qualname__} failed", bad))
    return [o.result for o in outcomes]


def launch_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline: float = 60.0,
    init: str = "gloo",
    env: Mapping[str, str] | None = None,
    cold: bool = False,
) -> list[RankOutcome]:
    """Run `fn(rank, world_size, *args)` in `world_size` processes and return how each of them ended.

    `fn` is a function at the top level of an importable module; arguments and results are pickled. `deadline` is in
    seconds, from start to end; RankError after that. `env` adds environment variables. `cold` starts fresh interpreters
    instead of forks, for what an import or the interpreter's start decides. `init` says what `fn` finds:

    * "gloo": the default process group, over a TCPStore that rank 0 keeps (as under Lightning's own launcher).
    * "env": no process group, but the variables that torchrun sets, with the store kept outside of the ranks, so that
      Lightning's `Trainer(devices=..., accelerator="cpu")` takes the ranks as they are.
    * "none": nothing.

    In "gloo", a rank that returns stays until all ranks have ended, so that the store outlives its users; a rank that
    raises or exits goes at once.
    """
    if "<locals>" in fn.__qualname__:
        raise ValueError(
            f"fn={fn.__qualname__} must be at the top level of its module, so that a process can import it"
        )
    if init not in ("gloo", "env", "none"):
        raise ValueError(f"init={init!r} must be 'gloo', 'env' or 'none'")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        common = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *(p for p in sys.path if p)]),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "PYTHONFAULTHANDLER": "1",
            "RANKS_FOLDER": folder,
            **(env or {}),
        }
        keep = None
        if init == "env":
            from torch.distributed import TCPStore

            keep = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            common |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(keep.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "tests",
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "GROUP_RANK": "0",
            }
        (Path(folder) / "job").write_bytes(pickle.dumps((fn.__module__, fn.__qualname__, args, deadline)))
        start = _fresh if cold or sys.platform != "linux" else Forked
        ranks = [_Rank(folder, rank, world_size, init, common, start) for rank in range(world_size)]
        try:
            late = _wait(ranks, time.monotonic() + deadline)
        finally:
            for rank in ranks:
                rank.kill()
        outcomes = [rank.outcome() for rank in ranks]
        del keep
    if late:
        raise RankError(_tell(f"ranks {late} of {fn.__qualname__} did not end within {deadline:g} s", outcomes))
    return outcomes


def _fresh(arguments: list[str], env: Mapping[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.workers", *arguments],
        env=env,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


class _Rank:
    def __init__(
        self, folder: str, rank: int, world_size: int, init: str, common: dict[str, str], start: Callable[..., Any]
    ) -> None:
        self.rank = rank
        self.seconds: float | None = None
        self._result = Path(folder) / f"result-{rank}"
        self._log = Path(folder) / f"stderr-{rank}"
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if init == "env" else {}
        with self._log.open("wb") as log:
            self.process = start([folder, str(rank), str(world_size), init], {**common, **mine}, log)
        self._began = time.monotonic()  # the first fork waits for its server
        self._killed = False

    def returned(self) -> bool:
        """Whether the function has returned or the process has ended; notes when."""
        done = self._result.exists() or self.process.poll() is not None
        if done and self.seconds is None:
            self.seconds = time.monotonic() - self._began
        return done

    def release(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        self.release()
        if self.process.poll() is None:
            self._killed = True
            self.process.kill()
        self.process.wait()

    def outcome(self) -> RankOutcome:
        result, error = pickle.loads(self._result.read_bytes()) if self._result.exists() else (None, None)
        code = None if self._killed else self.process.returncode
        text = self._log.read_text(errors="replace")
        return RankOutcome(self.rank, code, result, error, text, self.seconds or time.monotonic() - self._began)


def _wait(ranks: list[_Rank], until: float) -> list[int]:
    """Wait until all have returned, then let them go; return the ranks that are late."""
    late = [rank.rank for rank in ranks]
    while late:
        late = [rank.rank for rank in ranks if not rank.returned()]
        if late and time.monotonic() > until:
            return late
        time.sleep(0.01)
    for rank in ranks:
        rank.release()
    while any(rank.process.poll() is None for rank in ranks):
        if time.monotonic() > until:
            return [rank.rank for rank in ranks if rank.process.poll() is None]
        time.sleep(0.01)
    return []


def _tell(what: str, outcomes: list[RankOutcome]) -> str:
    parts = [what]
    for o in outcomes:
        end = "killed at the deadline" if o.exit_code is None else f"exit code {o.exit_code}"
        parts.append(f"--- rank {o.rank}: {end} after {o.seconds:.1f} s; its output ends with\n{o.stderr[-_TAIL:]}")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """What a rank does."""
    import importlib
    import traceback

    folder, rank, world_size, init = arguments[0], int(arguments[1]), int(arguments[2]), arguments[3]
    module, name, args, deadline = pickle.loads((Path(folder) / "job").read_bytes())
    if init == "gloo":
        _join(Path(folder), rank, world_size, deadline)
    result, error, code = None, None, 0
    try:
        result = getattr(importlib.import_module(module), name)(rank, world_size, *args)
    except Exception as exception:
        traceback.print_exc()
        error, code = f"{type(exception).__name__}: {exception}", 1
    text = pickle.dumps((result, error))
    partial = Path(folder) / f"partial-{rank}"
    partial.write_bytes(text)
    partial.rename(Path(folder) / f"result-{rank}")
    if code == 0 and init == "gloo":
        sys.stdin.read()  # returns when the test closes it
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    return code


def _join(folder: Path, rank: int, world_size: int, deadline: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    # Port 0: the system picks a free one while it binds, so that no other test can take it in between.
    limit = timedelta(seconds=deadline)
    file = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=limit)
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(file)
    else:
        until = time.monotonic() + deadline
        while not file.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"rank 0 has not opened its store within {deadline:g} s")
            time.sleep(0.01)
        port = int(file.read_text())
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
