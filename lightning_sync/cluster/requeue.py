"""Puts a job back into SLURM's queue after it has saved."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable

from lightning_sync.cluster.slurm import Job

Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]

_ATTEMPTS = 4
_PAUSE = 1.0
_DEADLINE = 20.0


def requeue(job: Job, run: Run | None = None, pause: float = _PAUSE) -> str | None:
    """Ask SLURM to start this job again, from its beginning, when there is room. Only one rank may call it.

    SLURM then ends what still runs of it (SIGTERM, after ``KillWait`` seconds SIGKILL). A controller that does not
    answer is asked four times.

    Args:
        job: This process's job.
        run: Runs a command; by default as a process with a deadline of 20 s.
        pause: Seconds before the second attempt; doubled each time.

    Returns:
        None if SLURM has accepted, else why not and what to do.
    """
    said = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            done = (run or _run)(["scontrol", "requeue", job.job])
        except FileNotFoundError:
            return (
                f"scontrol is not on PATH here, so that job {job.job} cannot be requeued from inside. In a container, "
                "mount SLURM's client (see recipes/README.md)."
            )
        except subprocess.TimeoutExpired:
            said = "no answer"
            continue
        if done.returncode == 0:
            return None
        said = (done.stderr or done.stdout).strip()
        if "disabled" in said or "Requested operation" in said:
            break
    hint = "submit with sbatch --requeue" if "disabled" in said else "only jobs of sbatch can be requeued"
    return f"scontrol requeue {job.job} failed ({said}); {hint}."


def is_preempted(job: Job, run: Run | None = None) -> bool:
    """Whether SLURM is taking this job's nodes away for another job; False where it does not answer.

    Args:
        job: This process's job.
        run: As for `requeue`.
    """
    try:
        done = (run or _run)(["scontrol", "-o", "show", "job", job.number])
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    found = re.search(r"\bPreemptTime=(\S+)", done.stdout)
    return done.returncode == 0 and found is not None and found[1] not in ("None", "Unknown")


def is_to_requeue(job: Job, reason: str, requeue_signal: str, run: Run | None = None) -> bool:
    """Whether a job that was asked to stop is to start again.

    The requeue signal (SIGUSR1 by default: ``--signal=USR1@120``, ``scancel --signal=USR1``) always asks for it.
    SIGTERM does when the job is preempted; else somebody has cancelled it, or its time is up without a warning.

    Args:
        job: This process's job.
        reason: Why the ranks have stopped, starting with the signal's name.
        requeue_signal: Name of the signal that asks for it.
        run: As for `requeue`.
    """
    return requeue_signal in reason or ("SIGTERM" in reason and is_preempted(job, run))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE)
