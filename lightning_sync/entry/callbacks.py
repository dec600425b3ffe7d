"""Callbacks that the entry adds to every run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_sync.entry.run_dir import close_run_dir, open_run_dir
from lightning_sync.monitor.summary import FILE_NAME


class KeepRunDir(pl.Callback):
    """Makes the run directory on rank 0, and keeps it marked as unfinished until ``fit`` has ended well.

    Must stand after `RunSummary`, so that the mark goes when the summary is there.

    Args:
        path: The run directory.
        config: The run's configuration as YAML, saved in it.
    """

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        self.config = config
        # Looked at now, since loggers make it before the first hook.
        self._disposable = not path.exists()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make and mark it."""
        if trainer.is_global_zero:
            open_run_dir(self.path, self.config)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From now on it may hold something of worth."""
        self._disposable = False

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the mark off, if anything was trained."""
        if trainer.is_global_zero and (self.path / FILE_NAME).exists():
            close_run_dir(self.path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove what this run made before it failed at its setup; later failures leave it marked."""
        if trainer.is_global_zero and self._disposable and self.path.exists():
            shutil.rmtree(self.path)


class ValidateAtEnd(pl.Callback):
    """Validates after the last step, also when ``max_steps`` ends the run in the middle of an epoch."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask for the stop one moment before Lightning would, which makes it validate first."""
        if 0 <= trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True
