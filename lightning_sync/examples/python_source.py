"""Bytes of the installed Python's own standard library: real text on every machine, nothing to download."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sync.examples.by_rank import SlicesByRank, measured_speeds, sizes_by_speed
from lightning_sync.examples.checks import check_integers

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_VALIDATION_PERCENT = 10


class Crops(Dataset[Tensor]):
    """Fixed crops of one long byte string.

    Item ``i`` is the same on every rank and in every epoch, so that a distributed sampler can share the items out.

    Args:
        text: The bytes, one uint8 per element.
        starts: Where each crop begins.
        length: Bytes per crop.
    """

    def __init__(self, text: Tensor, starts: Tensor, length: int) -> None:
        self.text = text
        self.starts = starts
        self.length = length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        """One crop as int64 byte values, shape ``(length,)``."""
        start = int(self.starts[index])
        return self.text[start : start + self.length].long()


class PythonSource(LightningDataModule):
    """The standard library's ``.py`` files as sequences of bytes, split by file into training and validation.

    Batches are int64 of shape ``(batch_size, length + 1)``: a model reads the first ``length`` bytes of a row and
    predicts the last ``length``. Tests and installed packages are left out. The split and the crops depend only on
    ``seed`` and on the installed Python, never on the rank.

    Args:
        batch_size: Sequences per rank and batch.
        length: Bytes that a model reads per sequence.
        train_sequences: Random crops that make up one epoch over all ranks.
        val_sequences: Evenly spaced crops of the validation files.
        seed: Chooses the validation files and the crops.
        num_workers: Loader processes per rank; 0 loads in the training process.
        by_rank: Other batch sizes on other ranks: a list with one for each, or ``"speed"``: ``batch_size`` on average,
            in proportion to how fast each rank is, measured when training starts. `None`: ``batch_size`` everywhere.

    Raises:
        ValueError: If a size is not a whole number from 1, or ``seed`` or ``num_workers`` not one from 0; when training
            starts, if ``by_rank`` has not one size per rank.
    """

    def __init__(
        self,
        batch_size: int = 8,
        length: int = 128,
        train_sequences: int = 16384,
        val_sequences: int = 256,
        seed: int = 0,
        num_workers: int = 0,
        by_rank: list[int] | Literal["speed"] | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "batch_size": batch_size,
            "length": length,
            "train_sequences": train_sequences,
            "val_sequences": val_sequences,
        }
        check_integers(1, sizes)
        check_integers(0, {"seed": seed, "num_workers": num_workers})
        self.batch_size = batch_size
        self.length = length
        self.train_sequences = train_sequences
        self.val_sequences = val_sequences
        self.seed = seed
        self.num_workers = num_workers
        if isinstance(by_rank, list):
            check_integers(1, {f"by_rank[{rank}]": size for rank, size in enumerate(by_rank)})
        elif by_rank not in (None, "speed"):
            raise ValueError(f"by_rank={by_rank!r} must be a list of batch sizes, 'speed' or None.")
        self.by_rank = by_rank

    def setup(self, stage: str) -> None:
        """Read the files and place the crops."""
        train, validation = read_split(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        last = len(train) - self.length - 1
        starts = torch.randint(0, last + 1, (self.train_sequences,), generator=generator)
        self.train_set = Crops(train, starts, self.length + 1)
        last = len(validation) - self.length - 1
        self.val_set = Crops(validation, torch.linspace(0, last, self.val_sequences).long(), self.length + 1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled; incomplete batches are dropped, so that every step has the same size."""
        if self.by_rank is not None:
            return self._slices(self.by_rank)
        return DataLoader(
            self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers
        )

    def _slices(self, by_rank: list[int] | Literal["speed"]) -> DataLoader[Tensor]:
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        if isinstance(by_rank, str):
            speeds = measured_speeds(self.trainer.strategy.root_device)
            by_rank = sizes_by_speed(self.batch_size * world_size, speeds)
            products = [round(speed) for speed in speeds]
            rank_zero_info(f"Batch sizes by rank: {by_rank}, for {products} matrix products a second.")
        if len(by_rank) != world_size:
            raise ValueError(f"by_rank={by_rank} must have one batch size for each of the {world_size} ranks.")
        sampler = SlicesByRank(len(self.train_set), by_rank, rank, self.seed)
        return DataLoader(self.train_set, batch_size=by_rank[rank], sampler=sampler, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Always the same sequences in the same order."""
        return DataLoader(self.val_set, batch_size=self.batch_size, num_workers=self.num_workers)


def read_split(seed: int) -> tuple[Tensor, Tensor]:
    """Read the standard library and split it by file.

    Args:
        seed: Chooses which tenth of the files is for validation.

    Returns:
        The training and the validation bytes, uint8.

    Raises:
        RuntimeError: If this Python comes without the sources of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _LEFT_OUT.intersection(relative.parts):
            parts[_is_validation(relative, seed)].append(path.read_bytes())
    train, validation = (b"\n".join(part) for part in parts)
    if min(len(train), len(validation)) < 100_000:
        raise RuntimeError(
            f"Found almost no .py files under {root}; data=python_source needs Python's library sources."
        )
    return _as_tensor(train), _as_tensor(validation)


def _is_validation(relative: Path, seed: int) -> bool:
    digest = hashlib.sha256(f"{seed}:{relative.as_posix()}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < _VALIDATION_PERCENT


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
