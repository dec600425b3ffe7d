"""A small convolutional network with BatchNorm, so that a model with buffers is among the examples."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sync.examples.checks import check_integers, check_number


class DigitsCNN(LightningModule):
    """Classifies 8 x 8 grey images into ten classes with Adam.

    Logs ``train_loss``, ``val_loss`` and ``val_accuracy``.

    Args:
        width: Channels of the first layer; the second has twice as many.
        lr: Adam's learning rate, above 0.

    Raises:
        ValueError: If ``width`` is not a whole number from 1, or ``lr`` not a number above 0.
    """

    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        check_integers(1, {"width": width})
        check_number("lr", lr, 0, open_low=True)
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(batch, 1, 8, 8)`` to logits ``(batch, 10)``."""
        logits: Tensor = self.layers(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean loss over the batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy, averaged over the ranks at the end of the epoch."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam at a constant rate."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
