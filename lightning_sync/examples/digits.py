"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels that come with the package."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sync.examples.checks import check_integers

_VALIDATION_IMAGES = 360


class Digits(LightningDataModule):
    """Images ``(batch, 1, 8, 8)`` with values in [0, 1], and labels ``(batch,)``.

    Args:
        batch_size: Images per rank and batch.
        seed: Chooses the 360 validation images; the split depends on nothing else.
        num_workers: Loader processes per rank; 0 loads in the training process.

    Raises:
        ValueError: If ``batch_size`` is not a whole number from 1, or another one not from 0.
    """

    def __init__(self, batch_size: int = 32, seed: int = 0, num_workers: int = 0) -> None:
        super().__init__()
        check_integers(1, {"batch_size": batch_size})
        check_integers(0, {"seed": seed, "num_workers": num_workers})
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Load and split the images."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target, dtype=torch.int64)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        validation, train = order[:_VALIDATION_IMAGES], order[_VALIDATION_IMAGES:]
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set = TensorDataset(images[validation], labels[validation])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled; incomplete batches are dropped, so that every step has the same size."""
        return DataLoader(
            self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Always the same images in the same order."""
        return DataLoader(self.val_set, batch_size=self.batch_size, num_workers=self.num_workers)
