"""The order of the demo's data."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer


class EpochByStep(Callback):
    """Shuffles every epoch by the steps done so far.

    Lightning 2.6.6 shuffles by its count of epochs, which a resume at the end of an epoch leaves one too high; the data
    of the epochs after it would then come in another order than in the run that nobody interrupted.

    Args:
        steps: Steps per epoch.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Called before the loader's iterator is made."""
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(trainer.global_step // self.steps)
