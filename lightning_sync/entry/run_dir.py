"""The directory of a run: agreed on by all ranks, made by rank 0, marked until the run has finished."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_sync.entry.errors import UsageError
from lightning_sync.entry.ranks import Ranks
from lightning_sync.monitor.summary import FILE_NAME

MARK = "UNFINISHED"
CONFIG = "config.yaml"
_INHERITED = "LIGHTNING_SYNC_RUN_DIR"
_STORE_KEY = "lightning_sync/run_dir"


def agree_on_run_dir(given: str | None, root: Path, ranks: Ranks) -> Path:
    """Find the run directory, the same on all ranks and without a process group.

    Args:
        given: The user's ``run_dir``; a relative path counts from ``root``.
        root: The directory in which the command was given.
        ranks: Who starts the ranks.

    Returns:
        An absolute path. Without ``given`` a new, time-stamped folder in ``root/runs``; under SLURM
        ``root/runs/slurm-JOB.STEP``, so that a requeued job finds its own.

    Raises:
        UsageError: If several nodes were started by hand without ``run_dir``.
    """
    if given is not None:
        return root / Path(given).expanduser()
    if ranks.starter == "slurm":
        job = f"{os.environ.get('SLURM_JOB_ID', 'unknown')}.{os.environ.get('SLURM_STEP_ID', '0')}"
        return root / "runs" / f"slurm-{job}"
    if ranks.starter == "torchrun":
        return root / "runs" / _agree_through_store(_new_name(root / "runs"))
    if ranks.num_nodes > 1:
        raise UsageError(
            f"run_dir is not given and trainer.num_nodes={ranks.num_nodes} nodes were started by hand, so that they "
            "cannot agree on a time-stamped folder; give all of them the same run_dir=PATH, or use srun or torchrun."
        )
    if "LOCAL_RANK" in os.environ and _INHERITED in os.environ:
        return Path(os.environ[_INHERITED])
    path = root / "runs" / _new_name(root / "runs")
    if ranks.relaunches:
        os.environ[_INHERITED] = str(path)
    return path


def open_run_dir(path: Path, config: str) -> None:
    """Make the directory and mark it unfinished. Only rank 0 may call it.

    The summary of an earlier run in the same place is kept as ``summary.previous.json``, later ones as
    ``summary.previous-2.json`` and so on, so that this run cannot be taken for finished and no result is lost.

    Args:
        path: The run directory.
        config: The run's configuration as YAML.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / MARK).write_text("This run has not finished, or it failed. The file goes when summary.json is written.\n")
    earlier = path / FILE_NAME
    if earlier.exists():
        earlier.replace(_free_name(path))
    (path / CONFIG).write_text(config, encoding="utf-8")


def close_run_dir(path: Path) -> None:
    """Take the mark off a finished run. Only rank 0 may call it.

    Args:
        path: The run directory.
    """
    (path / MARK).unlink(missing_ok=True)


def _free_name(folder: Path) -> Path:
    path, count = folder / "summary.previous.json", 1
    while path.exists():
        count += 1
        path = folder / f"summary.previous-{count}.json"
    return path


def _new_name(folder: Path) -> str:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    name, count = stamp, 1
    while (folder / name).exists():
        count += 1
        name = f"{stamp}-{count}"
    return name


def _agree_through_store(proposal: str) -> str:
    # torchrun's agent keeps a store at this address for the ranks; the first proposal stands.
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return bytes(store.compare_set(_STORE_KEY, "", proposal)).decode()
