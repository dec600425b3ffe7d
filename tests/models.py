"""Small LightningModules that know nothing of lightning_sync, with the things that break synchronisation."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Fixed random inputs with targets that can be learned."""

    def __init__(self, size: int = 96, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, width, generator=generator)
        self.y = self.x.cumsum(1).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Toy(LightningModule):
    """Several layers (so several buckets), BatchNorm buffers, one frozen parameter, one used every second batch."""

    def __init__(self, width: int = 16, depth: int = 4, alternate: bool = False, lr: float = 0.05, adam: bool = False):
        super().__init__()
        self.first = nn.Linear(width, 32, bias=False)  # before BatchNorm a bias has a gradient of pure rounding noise
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(depth)])
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, width)
        self.sometimes = nn.Linear(32, 32)
        self.sometimes.requires_grad_(alternate)
        self.frozen = nn.Parameter(torch.ones(32), requires_grad=False)
        self.alternate, self.lr, self.adam = alternate, lr, adam
        self.losses: list[float] = []

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        if extra:
            x = x + self.sometimes(x)
        return self.last(x * self.frozen)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x, self.alternate and batch_idx % 2 == 0), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noise(), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noise(24), batch_size=4)


def fit(
    module: LightningModule,
    strategy: Strategy | str,
    world_size: int,
    max_steps: int = 12,
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> Trainer:
    """Train on CPU in processes that exist already (see `tests.workers`, ``init="env"``), writing nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": os.environ.get("RANKS_FOLDER", tempfile.gettempdir()),
        "devices": world_size,
        "max_steps": max_steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }
    trainer = Trainer(strategy=strategy, **{**defaults, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def everything(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, detached copies."""
    return {k: v.detach().clone() for k, v in module.state_dict().items()}
