"""A model, data and a callback for jobs on the test cluster: fast steps, an exact position in the data, a trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class Tiny(pl.LightningModule):
    """Two layers with AdamW: whoever starts afresh after a resume ends elsewhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width} must be at least 1")
        self.layers = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = (self.head(self.layers(batch)).squeeze(1) - batch.square().sum(1) / 16).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(pl.LightningDataModule):
    """Batches that follow from rank and position alone."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        return Batches(self.batches, self.trainer.global_rank)


class Batches:
    """An iterable that can go on where it was."""

    def __init__(self, count: int, rank: int) -> None:
        self.count, self.rank, self.position = count, rank, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.count:
            draw = torch.Generator().manual_seed(self.rank * 1_000_003 + self.position)
            self.position += 1
            yield torch.randn(8, 16, generator=draw)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Trace(pl.Callback):
    """Says where each start of a job begins and how far it is, and reads the node's interface at two steps.

    `folder/starts` gets a line per start (restart count, first step), `folder/step` is rank 0's last finished step, and
    `folder/bytes-STEP-NODE-LOCAL.json` what the node's eth0 has sent by then, and what this rank promises to have sent.
    """

    def __init__(self, folder: str, bytes_at: list[int] | None = None, sleep: float = 0.0) -> None:
        self.folder, self.bytes_at, self.sleep = Path(folder), bytes_at or [], sleep
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with (self.folder / "starts").open("a") as file:
                file.write(f"{os.environ.get('SLURM_RESTART_COUNT', '0')} {trainer.global_step}\n")
        replicas = getattr(trainer.strategy, "leaders", None)
        if trainer.is_global_zero and replicas is not None:
            (self.folder / "leaders").write_text(json.dumps(list(replicas())))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if trainer.is_global_zero:
            (self.folder / "step.part").write_text(str(step))
            (self.folder / "step.part").replace(self.folder / "step")
        if step in self.bytes_at:
            # Whoever looks first must not miss what others still send for this step.
            time.sleep(1.0)
            seen = {
                "time": time.time(),
                "sent": int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text()),
                "promised": trainer.strategy.counters.network_bytes,  # type: ignore[attr-defined]
                "messages": trainer.strategy.counters.messages,  # type: ignore[attr-defined]
                "parameters": sum(p.numel() for p in trainer.strategy.model.parameters()),  # type: ignore[union-attr]
            }
            place = f"bytes-{step}-{trainer.node_rank}-{trainer.local_rank}.json"
            (self.folder / place).write_text(json.dumps(seen))
        if self.sleep:
            time.sleep(self.sleep)


def starts(folder: Path) -> list[tuple[int, int]]:
    """Restart count and first step of every start that came to training."""
    path = folder / "starts"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(a), int(b)) for a, b in (line.split() for line in lines)]


def last_step(folder: Path) -> int:
    """The last finished step; -1 before the first."""
    path = folder / "step"
    return int(path.read_text()) if path.exists() else -1
