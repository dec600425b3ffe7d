"""Kills or stops ranks of real runs at random moments, and checks what the others do.

    python -m tests.kills --kills 100 --stops 20 --seed 0

Every trial has a seed, which is printed: it chooses the strategy, the rank (never rank 0, which keeps the store), the
step, the moment (compute, encode, collective, saving) and a delay. `--only SEED` repeats one trial.

* SIGKILL: every survivor ends within 10 s, with an error that names the rank which was killed.
* SIGSTOP: the same within step_timeout and 10 s.
* Every checkpoint on disk is whole, and the newest one can be gone on from (some trials do, with all ranks).

Ranks are forked from this process, which has imported everything, and end as ordinary interpreters do.
"""

import argparse
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it on first use

from lightning_sync.checkpoint import SyncFolder
from tests.killed_ranks import PERIODIC, RANKS, STEP_TIMEOUT, Plan, train

WITHIN = 10.0
START_WITHIN = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(plan: Plan, folder: Path, resume: Path | None = None) -> list[int]:
    """Fork the ranks; in a rank this raises `_EndOfRank` when it is done."""
    port = free_port()
    pids = []
    for rank in range(RANKS):
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        log = os.open(
            folder / f"log-{rank}{'' if resume is None else '-resumed'}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "kills",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        try:
            train(rank, plan, folder, resume)
        except Exception:
            traceback.print_exc()
            raise _EndOfRank(1) from None
        raise _EndOfRank(0)
    return pids


class _EndOfRank(SystemExit):
    """Ends a rank as an interpreter ends, with all its clean-up."""


@dataclass
class Outcome:
    """How the trial went.

    Attributes:
        problems: What is wrong; nothing, if all is well.
        named: Seconds until the last survivor had written which rank it was.
        ended: Seconds until the last survivor's process had ended. An interpreter that holds torch takes 1.4 s of CPU
            time to end, so on a busy machine this says more about the machine.
    """

    problems: list[str]
    named: float = 0.0
    ended: float = 0.0


def wait_for(
    pids: dict[int, int], until: float, look: Callable[[], None] = lambda: None
) -> dict[int, tuple[int, float]]:
    """Wait for ranks, and `look` all the while; returns the exit code and the time of each that has ended."""
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < len(pids) and time.monotonic() < until:
        look()
        for rank, pid in pids.items():
            if rank not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[rank] = (os.waitstatus_to_exitcode(status), time.monotonic())
        time.sleep(0.02)
    look()
    return ended


def state(pid: int) -> str:
    """What a late process does, where the system tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        return f"state {fields[0]}, {(int(fields[11]) + int(fields[12])) / ticks:.1f} s of CPU time used"
    except OSError:
        return "unknown"


def end_all(pids: dict[int, int], ended: dict[int, Any]) -> None:
    for rank, pid in pids.items():
        if rank not in ended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_trial(plan: Plan, folder: Path, resume: bool, allowance: float = 0.0) -> Outcome:
    """One trial, from the start of the ranks to the check of the checkpoints."""
    named: dict[int, float] = {}

    def look() -> None:
        for rank in survivors:
            if rank not in named and re.search(
                rf"rank {plan.victim} \(host [^)]*\) failed", (folder / f"log-{rank}").read_text(errors="replace")
            ):
                named[rank] = time.monotonic() - began

    pids = dict(enumerate(start(plan, folder)))
    ended: dict[int, tuple[int, float]] = {}
    try:
        until = time.monotonic() + START_WITHIN
        while not (folder / "ready").exists():
            if time.monotonic() > until:
                return Outcome([f"the moment did not come within {START_WITHIN:g} s"])
            time.sleep(0.001)
        time.sleep(plan.delay)
        os.kill(pids[plan.victim], plan.sign)
        began = time.monotonic()
        within = WITHIN + (STEP_TIMEOUT if plan.sign == signal.SIGSTOP else 0)
        survivors = {rank: pid for rank, pid in pids.items() if rank != plan.victim}
        late_after = within + allowance + 30  # to tell late from never
        ended = wait_for(survivors, began + late_after, look)
        states = {rank: state(pid) for rank, pid in survivors.items() if rank not in ended}
    finally:
        end_all(pids, ended)
    problems = []
    for rank in survivors:
        if rank not in ended:
            problems.append(f"rank {rank} had not ended after {late_after:g} s ({states.get(rank, '?')})")
            continue
        code, when = ended[rank]
        if code not in (1, 70):
            problems.append(f"rank {rank} ended with {code}")
        if when - began > within + allowance:
            problems.append(f"rank {rank} ended after {when - began:.1f} s")
        if named.get(rank, 1e9) > within:
            problems.append(f"rank {rank} named rank {plan.victim} after {named.get(rank)} s")
        if plan.sign == signal.SIGSTOP and not (folder / "stacks" / f"rank-{rank}.txt").exists():
            problems.append(f"rank {rank} has written no stacks")
    problems += check_saved(plan, folder, resume)
    slowest = max((when - began for _, when in ended.values()), default=0.0)
    return Outcome(problems, max(named.values(), default=0.0), slowest)


def check_saved(plan: Plan, folder: Path, resume: bool) -> list[str]:
    """Every checkpoint is whole; with `resume` all ranks go on from the newest."""
    saved = sorted((folder / "saved").glob("*.ckpt"), key=lambda p: int(p.stem.rpartition("=")[2]))
    for path in saved:
        try:
            tag = torch.load(path, weights_only=True)["lightning_sync"]
            manifest = SyncFolder(path).manifest(tag["save"], tag["checksum"])
            for rank in range(RANKS):
                SyncFolder(path).read(manifest, rank)
        except Exception as error:
            return [f"{path.name} is not whole: {type(error).__name__}: {error}"]
    if not saved:
        return [] if plan.step <= 3 or plan.moment == "saving" else ["no checkpoint was saved"]
    if not resume:
        return []
    pids = dict(enumerate(start(plan, folder, saved[-1])))
    ended: dict[int, tuple[int, float]] = {}
    try:
        ended = wait_for(pids, time.monotonic() + START_WITHIN)
    finally:
        end_all(pids, ended)
    problems = [f"resumed rank {r} ended with {ended.get(r, ('no end', 0))[0]}" for r in pids if ended.get(r, (1,))[0]]
    for rank in pids:
        log = (folder / f"log-{rank}-resumed").read_text(errors="replace")
        if "went on to step" not in log:
            problems.append(f"resumed rank {rank} did not go on:\n{log[-1500:]}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--periodic", action="store_true", help="hybrid modes and delayed instead of strict")
    parser.add_argument("--only", type=int, default=None, help="repeat the trial with this seed")
    parser.add_argument("--stop", action="store_true", help="with --only: SIGSTOP instead of SIGKILL")
    parser.add_argument("--victim", type=int, default=None, help="always this rank; 0 keeps the store")
    parser.add_argument(
        "--resume-every", type=int, default=10, help="trials that also go on from the newest checkpoint"
    )
    parser.add_argument("--keep", type=Path, default=None, help="where folders of trials with problems are kept")
    parser.add_argument(
        "--allowance", type=float, default=0.0, help="seconds more for processes to end, on a machine that is busy"
    )
    chosen = parser.parse_args()
    modes = PERIODIC if chosen.periodic else None
    if chosen.only is not None:
        plans = [Plan.draw(chosen.only, signal.SIGSTOP if chosen.stop else signal.SIGKILL, modes)]
    else:
        end = chosen.seed + chosen.kills
        plans = [Plan.draw(seed, signal.SIGKILL, modes) for seed in range(chosen.seed, end)]
        plans += [Plan.draw(seed, signal.SIGSTOP, modes) for seed in range(end, end + chosen.stops)]
    if chosen.victim is not None:
        plans = [replace(plan, victim=chosen.victim) for plan in plans]
    torch.set_num_threads(1)
    assert threading.active_count() == 1, "ranks are forked"
    bad = 0
    outcomes: dict[signal.Signals, list[Outcome]] = {signal.SIGKILL: [], signal.SIGSTOP: []}
    for number, plan in enumerate(plans):
        folder = Path(tempfile.mkdtemp(prefix="kills-"))
        resume = number % chosen.resume_every == 0
        outcome = run_trial(plan, folder, resume, chosen.allowance)
        outcomes[plan.sign].append(outcome)
        bad += bool(outcome.problems)
        what = "; ".join(outcome.problems) or "all survivors ended and named it, checkpoints are whole"
        times = f"named after {outcome.named:.1f} s, ended after {outcome.ended:.1f} s{', resumed' * resume}"
        print(f"{plan}: {what} ({times})", flush=True)
        if outcome.problems and chosen.keep is not None:
            shutil.copytree(folder, chosen.keep / f"seed-{plan.seed}", dirs_exist_ok=True)
        shutil.rmtree(folder)
    for sign, those in outcomes.items():
        if those:
            good = sum(not o.problems for o in those)
            named, ended = (sorted(getattr(o, name) for o in those) for name in ("named", "ended"))
            print(f"{sign.name}: {good} of {len(those)} as documented; seconds, median and slowest:", end=" ")
            middle = len(those) // 2
            print(f"named {named[middle]:.1f}, {named[-1]:.1f}; ended {ended[middle]:.1f}, {ended[-1]:.1f}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
