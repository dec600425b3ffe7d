#!/usr/bin/env python3
"""Start a Python script with one process per rank, on emulated hosts or on loopback, as torchrun would.

    sudo python recipes/bench/launch.py --hosts 2 --ranks-per-host 2 --rate 100mbit -- train.py --steps 10
    sudo python recipes/bench/launch.py --prefix PREFIX -- train.py      # hosts made by `hosts.py up`
    python recipes/bench/launch.py --ranks-per-host 2 -- train.py        # one host, this machine's loopback, no root

The ranks see torchrun's variables, so that Lightning picks `TorchElasticEnvironment`; in the script give the Trainer
`devices=<ranks per host>, num_nodes=<hosts>`. Rank 0's output is shown, the others' go to files. If a rank fails or the
deadline passes, all are ended. Exit status: 0, that of the rank that failed first, or 124 after the deadline.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hosts import UNLIMITED, Hosts, HostsError, end_session, ending_on_sigterm, exit_status

PORT = 29500
DEADLINE_STATUS = 124
GRACE = 3.0  # seconds that the other ranks have to say what they saw after one has failed


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however that happens."""
    set_parent_death_signal = 1
    if ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def run_ranks(
    script: Sequence[str],
    *,
    hosts: Hosts | None,
    ranks_per_host: int,
    deadline: float,
    logs: Path,
    environment: Mapping[str, str] | None = None,
    pin: bool = True,
) -> int:
    """Run a script in every rank and wait for it.

    Args:
        script: The script and its arguments, run by this interpreter.
        hosts: The hosts, all of them used; None for one host on loopback.
        ranks_per_host: Processes per host, at least 1.
        deadline: Seconds after which all ranks are ended.
        logs: Folder for `rank<r>.log` of the ranks from 1 on; made if missing.
        environment: Variables that the ranks get besides this process's own.
        pin: Bind rank r to one core, the r-th of those this process may use, round and round.

    Returns:
        0 if all ranks returned 0, `DEADLINE_STATUS` after the deadline, else the status of the first that failed.

    Raises:
        ValueError: An argument is out of range.
    """
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host!r} is not accepted: at least 1.")
    if deadline <= 0:
        raise ValueError(f"deadline={deadline!r} s is not accepted: more than 0.")
    logs.mkdir(parents=True, exist_ok=True)
    world = ranks_per_host * (1 if hosts is None else hosts.count)
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_WORLD_SIZE": str(world // ranks_per_host),
        "MASTER_ADDR": "127.0.0.1" if hosts is None else hosts.address(0),
        "MASTER_PORT": str(_free_port() if hosts is None else PORT),
        "GLOO_SOCKET_IFNAME": "lo" if hosts is None else "eth0",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(4),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    cores = sorted(os.sched_getaffinity(0))
    ranks: list[subprocess.Popen[Any]] = []
    try:
        for rank in range(world):
            host, local_rank = divmod(rank, ranks_per_host)
            own = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": host, "NODE_RANK": host}
            core = cores[rank % len(cores)] if pin else None
            command = [sys.executable, *script]
            with ExitStack() as stack:
                output = None if rank == 0 else stack.enter_context((logs / f"rank{rank}.log").open("wb"))
                ranks.append(
                    subprocess.Popen(
                        command if hosts is None else hosts.command(host, command),
                        env={**os.environ, **shared, **{k: str(v) for k, v in own.items()}, **(environment or {})},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output and subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=lambda core=core: _prepare(core),
                    )
                )
        return _wait(ranks, deadline, logs)
    finally:
        for process in ranks:
            end_session(process)


def _wait(ranks: Sequence[subprocess.Popen[Any]], deadline: float, logs: Path) -> int:
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        states = [exit_status(process) for process in ranks]
        failed = [rank for rank, state in enumerate(states) if state]
        if failed:
            _let_end(ranks, time.monotonic() + GRACE)
            return _report(failed[0], states[failed[0]] or 0, logs)
        if None not in states:
            return 0
        time.sleep(0.02)
    running = [rank for rank, process in enumerate(ranks) if exit_status(process) is None]
    print(f"launch: the deadline of {deadline:g} s passed; ranks {running} were ended", file=sys.stderr)
    return DEADLINE_STATUS


def _let_end(ranks: Sequence[subprocess.Popen[Any]], end: float) -> None:
    while time.monotonic() < end and any(exit_status(process) is None for process in ranks):
        time.sleep(0.02)


def _report(rank: int, status: int, logs: Path) -> int:
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    print(f"launch: rank {rank} ended {how}, so all ranks were ended", file=sys.stderr)
    if rank > 0:
        tail = (logs / f"rank{rank}.log").read_text(errors="replace").splitlines()[-20:]
        print("\n".join(f"  rank {rank}: {line}" for line in tail), file=sys.stderr)
    return status if status > 0 else 128 - status


def _prepare(core: int | None) -> None:
    die_with_parent()
    if core is not None:
        os.sched_setaffinity(0, {core})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description="One process per rank, on emulated hosts or on loopback.")
    parser.add_argument("--hosts", type=int, help="make this many hosts for the run (root)")
    parser.add_argument("--rate", default=UNLIMITED, help="rate of their links (default: %(default)s)")
    parser.add_argument("--prefix", help="use these hosts, made by `hosts.py up`, instead (root)")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=600, help="seconds (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for the logs of ranks 1, 2, ... (default: a temporary one)")
    parser.add_argument("--no-pin", action="store_true", help="do not bind ranks to cores")
    parser.add_argument("script", nargs="+", help="after `--`: script and arguments")
    chosen = parser.parse_args(arguments)
    if chosen.hosts is not None and chosen.prefix is not None:
        parser.error("--hosts makes new hosts and --prefix uses existing ones: give one of them.")
    try:
        with ending_on_sigterm(), ExitStack() as stack:
            hosts = None
            if chosen.hosts is not None:
                hosts = stack.enter_context(Hosts(chosen.hosts, chosen.rate))
            elif chosen.prefix is not None:
                hosts = Hosts.attach(chosen.prefix)
            logs = chosen.logs or Path(tempfile.mkdtemp(prefix="lsync-logs-"))
            status = run_ranks(
                chosen.script,
                hosts=hosts,
                ranks_per_host=chosen.ranks_per_host,
                deadline=chosen.deadline,
                logs=logs,
                pin=not chosen.no_pin,
            )
            if status != 0:
                print(f"launch: the other ranks' output is in {logs}", file=sys.stderr)
            return status
    except (HostsError, ValueError) as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
