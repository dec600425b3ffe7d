"""Callbacks that the entry adds to every run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_sync.entry.run_dir import close_run_dir, open_run_dir
from lightning_sync.monitor.summary import FILE_NAME


class KeepRunDir(pl.Callback):
    """Makes the run directory on rank 0 when training starts, and marks it as unfinished until ``fit`` has ended well.

    Until then the directory of an earlier run stays as it is. Must stand after `RunSummary`, so that the mark goes when
    the summary is there.

    Args:
        path: The run directory.
        config: The run's configuration as YAML, saved in it.
    """

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        self.config = config
        # Looked at now, since loggers make it before the first hook.
        self._new = not path.exists()
        self._started = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make and mark it."""
        self._started = True
        if trainer.is_global_zero:
            open_run_dir(self.path, self.config)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the mark off, if anything was trained."""
        if trainer.is_global_zero and self._started and (self.path / FILE_NAME).exists():
            close_run_dir(self.path)

    def discard_unstarted(self, trainer: pl.Trainer) -> None:
        """Remove a directory that loggers made for a run whose training never started.

        Args:
            trainer: The trainer, after its ``fit`` has ended in whatever way.
        """
        if trainer.is_global_zero and self._new and not self._started and self.path.exists():
            shutil.rmtree(self.path)


class ValidateAtEnd(pl.Callback):
    """Validates after the last step, also when ``max_steps`` ends the run in the middle of an epoch."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask for the stop one moment before Lightning would, which makes it validate first."""
        if 0 <= trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True
