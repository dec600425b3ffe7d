"""Tells an un-wrapped strategy where a step ends: Lightning calls strategies at the start of a batch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class StepBoundary(Callback):
    """The first of the trainer's callbacks, so that all others see what an exchange has changed.

    Args:
        end_batch: Called after every training batch.
        leave_batch: Called when an epoch ends, perhaps within a batch that `on_train_batch_start` has skipped.
        end_training: Called when training ends without an exception.
    """

    def __init__(
        self, end_batch: Callable[[], None], leave_batch: Callable[[], None], end_training: Callable[[], None]
    ) -> None:
        self._end_batch = end_batch
        self._leave_batch = leave_batch
        self._end_training = end_training

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """All optimisers and the schedulers of steps have stepped; nobody has validated or saved yet."""
        self._end_batch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No batch is under way."""
        self._leave_batch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last batch is over."""
        self._end_training()


def is_last_step(trainer: Trainer | None) -> bool:
    """Whether the step that has just been made is the last one that the trainer's limits allow."""
    if trainer is None:
        return False
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    epochs = trainer.max_epochs
    return epochs is not None and 0 <= epochs <= trainer.current_epoch + 1 and trainer.is_last_batch
