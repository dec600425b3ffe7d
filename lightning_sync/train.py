"""Train with any strategy and compressor from the command line: ``python -m lightning_sync.train``.

On one machine it starts its own ranks (all GPUs, else two CPU processes of one thread each); under srun or torchrun it
uses those. Examples::

    python -m lightning_sync.train strategy=strict compressor=int8 trainer.max_steps=500
    python -m lightning_sync.train experiment=digits strategy=ddp run_dir=runs/baseline
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import hydra
import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_original_cwd, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_sync.cluster import early
from lightning_sync.cluster.slurm import current_job
from lightning_sync.entry.callbacks import KeepRunDir, ValidateAtEnd
from lightning_sync.entry.config import check_arguments, settle
from lightning_sync.entry.errors import UsageError, concerns_all, missing_package, sentence
from lightning_sync.entry.jobs import check_job, checkpoint_to_resume
from lightning_sync.entry.ranks import Ranks, find_ranks, limit_threads
from lightning_sync.entry.run_dir import agree_on_run_dir
from lightning_sync.monitor.summary import RunSummary, print_summary

_FULL_ERROR = "HYDRA_FULL_ERROR"
_STOPPED = 128 + signal.SIGTERM
_RANK_NAMES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def main() -> None:
    """Compose the configuration from the command line and run it.

    Errors in the arguments end with exit code 1 and one sentence; HYDRA_FULL_ERROR=1 shows their traceback. A run that
    SIGTERM or SIGUSR1 stopped ends with exit code 143, without a summary.
    """
    wanted = os.environ.get(_FULL_ERROR)
    if current_job() is not None:
        early.listen()

    @hydra.main(version_base="1.3", config_path="pkg://lightning_sync.examples.conf", config_name="train")
    def task(cfg: DictConfig) -> None:
        _restore(wanted)
        # A launcher that runs this elsewhere takes back exceptions, but would wait for a process that leaves.
        with _one_sentence(traceback=wanted == "1" or _is_launched_elsewhere()):
            run(cfg)

    # Makes Hydra raise what it finds wrong while composing, instead of printing several lines and leaving.
    os.environ[_FULL_ERROR] = "1"
    try:
        # Hydra raises a bare ValueError for GROUP=null; a ValueError of ours has been dealt with inside.
        with _one_sentence(ValueError, traceback=wanted == "1"):
            if importlib.util.find_spec("lightning_sync.conf") is None:
                raise UsageError("lightning_sync.conf is not installed; install this checkout with: pip install -e .")
            task()
    finally:
        _restore(wanted)


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train as a configuration says.

    Args:
        cfg: Composed from ``train.yaml``, inside a Hydra job.

    Returns:
        The summary of the run, as in ``summary.json``.

    Raises:
        UsageError: If the configuration cannot be run here; before any process group exists, except for what only a
            strategy's ``setup`` can know.
        SystemExit: With code 143 if SIGTERM or SIGUSR1 stopped the run.
    """
    check_arguments(cfg)
    ranks = find_ranks(cfg.trainer.accelerator, _plain(cfg.trainer.devices), cfg.trainer.num_nodes)
    run_dir = agree_on_run_dir(_own_run_dir(cfg, ranks), Path(get_original_cwd()), ranks)
    check_job(ranks, run_dir)
    ckpt_path = checkpoint_to_resume(cfg.ckpt_path, run_dir)
    settle(cfg, ranks, run_dir, HydraConfig.get().runtime.choices)
    limit_threads(ranks)
    if cfg.seed is not None:
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
    summary = RunSummary(run_dir)
    keep = KeepRunDir(run_dir, OmegaConf.to_yaml(cfg, resolve=True))
    trainer = _build_trainer(cfg, [summary, keep, ValidateAtEnd()])
    data = instantiate(cfg.data)
    model = instantiate(cfg.model)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    except SIGTERMException as error:
        if trainer.is_global_zero:
            why = getattr(trainer.strategy, "stopped_because", None) or "SIGTERM"
            saved = getattr(trainer.strategy, "stopped_at", None)
            job = getattr(trainer.strategy, "requeued", None)
            text = f"stopped by {why} at step {trainer.global_step}; {run_dir} has no summary"
            text += "" if saved is None else f"; go on with ckpt_path={saved}"
            print(text if job is None else f"{text}; job {job} is requeued and goes on from there", file=sys.stderr)
        raise SystemExit(_STOPPED) from error
    except (MisconfigurationException, ValueError, TypeError) as error:
        if summary.started:
            raise
        # Checks of options come out the same everywhere; what fails in a model or its data need not.
        raise UsageError(str(error), on_all=_raised_in(error).startswith(("lightning.", "lightning_sync."))) from error
    finally:
        keep.discard_unstarted(trainer)
    if summary.result is None:
        raise UsageError(_why_nothing_was_trained(cfg, ckpt_path, trainer))
    if trainer.is_global_zero:
        print_summary(summary.result)
    return summary.result


def _raised_in(error: BaseException) -> str:
    """The module whose line raised an error."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


def _why_nothing_was_trained(cfg: DictConfig, ckpt_path: str | None, trainer: pl.Trainer) -> str:
    if ckpt_path is None:
        return (
            f"nothing was trained: there are no training batches with trainer.limit_train_batches="
            f"{cfg.trainer.get('limit_train_batches')} and this data; raise it, or give more data or smaller batches."
        )
    return (
        f"ckpt_path={ckpt_path} is at step {trainer.global_step} already, so that nothing was trained; "
        f"raise trainer.max_steps={trainer.max_steps} or trainer.max_epochs={trainer.max_epochs}."
    )


def _own_run_dir(cfg: DictConfig, ranks: Ranks) -> str | None:
    """The user's run_dir, one below it for each job of a multirun; refuses a multirun that cannot work."""
    hydra_cfg = HydraConfig.get()
    if hydra_cfg.mode != RunMode.MULTIRUN:
        run_dir: str | None = cfg.run_dir
        return run_dir
    in_one_process = not _is_launched_elsewhere()
    if ranks.relaunches or (in_one_process and ranks.count > 1):
        raise UsageError(
            f"multirun (-m) with {ranks.count} ranks: the other ranks are started with the same command line and would "
            "run the whole sweep again, each with its own overrides; accepted: trainer.devices=1, one command per job, "
            "or a launcher that starts one srun per job (hydra/launcher=slurm)."
        )
    return None if cfg.run_dir is None else f"{cfg.run_dir}/{hydra_cfg.job.num}"


def _is_launched_elsewhere() -> bool:
    """Whether this is a job of a sweep that Hydra's launcher runs in a process of its own."""
    hydra_cfg = HydraConfig.get()
    return hydra_cfg.mode == RunMode.MULTIRUN and not hydra_cfg.launcher["_target_"].endswith("BasicLauncher")


def _build_trainer(cfg: DictConfig, ours: list[pl.Callback]) -> pl.Trainer:
    """Build it with everything converted to plain Python, so that no DictConfig reaches a strategy."""
    logger = cfg.get("logger")
    loggers = instantiate(logger, _convert_="all") if logger else False
    callbacks = [instantiate(node, _convert_="all") for node in cfg.callbacks.values() if node is not None]
    make = instantiate(cfg.trainer, _partial_=True, _convert_="all")
    try:
        trainer: pl.Trainer = make(callbacks=[*callbacks, *ours], logger=loggers)
    except ModuleNotFoundError as error:
        raise UsageError(missing_package("trainer", error), on_all=False) from error
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"trainer: {error}", on_all=False) from error
    return trainer


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


@contextmanager
def _one_sentence(*also: type[Exception], traceback: bool) -> Iterator[None]:
    """Leave the process with one line on stderr and exit code 1 when the arguments are to blame.

    What all ranks find is said by rank 0 only.
    """
    blamed: tuple[type[Exception], ...] = (UsageError, HydraException, OmegaConfBaseException, *also)
    try:
        yield
    except blamed as error:
        if traceback:
            raise
        rank = next((os.environ[name] for name in _RANK_NAMES if os.environ.get(name)), "0")
        if rank != "0" and concerns_all(error):
            sys.exit(1)
        sys.exit(("" if rank == "0" else f"rank {rank}: ") + f"error: {sentence(error)}")


def _restore(value: str | None) -> None:
    if value is None:
        os.environ.pop(_FULL_ERROR, None)
    else:
        os.environ[_FULL_ERROR] = value


if __name__ == "__main__":
    main()
