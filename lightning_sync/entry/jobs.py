"""A run as a job of SLURM: checked before anything starts, and resumed when SLURM starts it again."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_sync.cluster.newest import newest_checkpoint
from lightning_sync.cluster.preflight import PreflightError, preflight
from lightning_sync.cluster.slurm import current_job
from lightning_sync.entry.errors import UsageError
from lightning_sync.entry.ranks import Ranks

log = logging.getLogger(__name__)

#: The value of ckpt_path that stands for the newest complete checkpoint in the run directory.
NEWEST = "newest"


def check_job(ranks: Ranks, run_dir: Path) -> None:
    """Check a job of SLURM before any process group exists; nothing elsewhere.

    Args:
        ranks: The ranks of the run.
        run_dir: Its directory, which all of them must see.

    Raises:
        UsageError: If something is not as it must be; the message has every finding with its remedy.
    """
    job = current_job()
    by_srun = job is not None and job.step is not None and job.tasks > 1  # of whatever name
    if ranks.starter != "slurm" and not (ranks.starter == "self" and by_srun):
        return
    devices = ranks.count // ranks.num_nodes
    try:
        preflight(run_dir, devices=devices, num_nodes=ranks.num_nodes, accelerator=ranks.accelerator)
    except PreflightError as error:
        # Every rank has the same report.
        raise UsageError(str(error)) from error


def checkpoint_to_resume(given: str | None, run_dir: Path) -> str | None:
    """What a run starts from.

    Args:
        given: The user's ``ckpt_path``.
        run_dir: The run directory.

    Returns:
        For ``newest``, and for a job that SLURM has started again, the newest complete checkpoint in the run directory,
        whatever wrote it. Where there is none, and otherwise, what was given (None for ``newest``).
    """
    job = current_job()
    again = job is not None and job.restarts > 0
    if given != NEWEST and not again:
        return given
    found = newest_checkpoint(run_dir)
    otherwise = None if given == NEWEST else given
    if job is None or job.rank == 0:
        why = f"job {job.job} was started again (restart {job.restarts})" if job is not None and again else "newest"
        log.info("%s: %s", why, f"resuming from {found}" if found else f"no checkpoint in {run_dir} yet")
    return found or otherwise
