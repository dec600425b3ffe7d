"""The result of a run: ``summary.json`` in its directory and a short table on the screen."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections import deque
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_sync.comm.counters import Counters
from lightning_sync.compressors import Compressor, Route, registry

FILE_NAME = "summary.json"
_LOSSES_AVERAGED = 50


@runtime_checkable
class Counted(Protocol):
    """A strategy or precision plugin that counts its traffic. Lightning's own do not."""

    @property
    def counters(self) -> Counters:
        """What this rank has counted since the start of ``fit``."""
        ...


@runtime_checkable
class Described(Protocol):
    """A strategy that knows what it is made of. Lightning's own do not."""

    def describe(self) -> Mapping[str, str]:
        """Names of the strategy, compressor and aggregator."""
        ...


@runtime_checkable
class Compressing(Protocol):
    """A precision plugin that may hold a compressor."""

    @property
    def compressor(self) -> Compressor | Route | None:
        """The compressor, if there is one."""
        ...


@runtime_checkable
class Reporting(Protocol):
    """A strategy whose ranks go at their own speed, and say how far apart they were."""

    @property
    def report(self) -> Mapping[str, float]:
        """Numbers of this rank, the same names on all ranks."""
        ...


class RunSummary(pl.Callback):
    """Writes ``summary.json`` when, and only when, ``fit`` has finished.

    Keys: ``strategy compressor aggregator precision world_size steps train_loss val_loss val_accuracy
    wire_bytes_per_step compression_ratio skipped_steps exchanges wall_seconds wait_seconds asynchronous versions``. A
    value is null where it does not apply (bytes under Lightning's own strategies, accuracy of a language model) or is
    not finite.
    ``train_loss`` is the mean over the last 50 batches and all ranks, ``val_*`` are those of the last validation,
    ``skipped_steps`` are those left out for inf or NaN (on rank 0), ``wall_seconds`` runs from the first to the last
    step and includes validation, bytes and waiting are means over the ranks. ``asynchronous`` holds, for strategies
    whose ranks go at their own speed, their staleness (in versions of a shard) and clock lead (in exchanges), each as
    mean, p95 and max, the achieved period in steps, exchanges that were put together, and letters refused: means over
    the ranks, of a max the largest.

    Args:
        directory: The run directory; the file is put there atomically.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.result: dict[str, Any] | None = None
        self.started = False
        self._begin = 0.0
        self._losses: deque[Tensor] = deque(maxlen=_LOSSES_AVERAGED)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.started = True
        self.result = None
        self._losses.clear()
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, without waiting for the device."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect the numbers of all ranks while they can still talk to each other."""
        wall_seconds = time.perf_counter() - self._begin
        counters = counters_of(trainer)
        names = names_of(trainer)
        loss = torch.stack(list(self._losses)).double().mean().item() if self._losses else math.nan
        local = [loss, 0.0, 0.0, math.nan]
        if counters:
            steps = max(1, counters.steps)
            local[1:3] = [counters.wire_bytes / steps, counters.dense_bytes / steps]
            local[3] = math.nan if counters.wait_seconds is None else counters.wait_seconds
        mean = _mean_over_ranks(trainer, local)
        metrics = trainer.callback_metrics
        self.result = {
            "strategy": names["strategy"],
            "compressor": names["compressor"],
            "aggregator": names["aggregator"],
            "precision": trainer.precision,
            "world_size": trainer.world_size,
            "steps": trainer.global_step,
            "train_loss": _finite(mean[0]),
            "val_loss": _finite(metrics.get("val_loss")),
            "val_accuracy": _finite(metrics.get("val_accuracy")),
            "wire_bytes_per_step": mean[1] if counters else None,
            "compression_ratio": mean[2] / mean[1] if counters and mean[1] else None,
            "skipped_steps": counters.skipped_steps if counters else None,
            "exchanges": counters.exchanges if counters else None,
            "wall_seconds": round(wall_seconds, 3),
            "wait_seconds": _finite(round(mean[3], 3)),
            "asynchronous": _report(trainer),
            "versions": _versions(),
        }

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write: whatever can fail in ``fit`` is over."""
        if self.result is not None and trainer.is_global_zero:
            write_summary(self.directory, self.result)


def write_summary(directory: Path, summary: Mapping[str, Any]) -> None:
    """Put ``summary.json`` into a directory; a reader sees all of it or nothing.

    Args:
        directory: Made if it is missing.
        summary: What to write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{FILE_NAME}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(summary, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / FILE_NAME)


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print a summary as a table of two columns.

    Args:
        summary: As written by `write_summary`.
    """
    table = Table(title="summary", show_header=False)
    for key, value in summary.items():
        table.add_row(key, _readable(value))
    Console().print(table)


def counters_of(trainer: pl.Trainer) -> Counters | None:
    """What this rank counts, or `None` if nothing has been counted."""
    # Under Lightning's own ddp a WirePrecision plugin does the reductions, and the counting with it.
    candidates: tuple[object, object] = (trainer.strategy, trainer.precision_plugin)
    counted = (candidate.counters for candidate in candidates if isinstance(candidate, Counted))
    return next((counters for counters in counted if counters.steps), None)


def names_of(trainer: pl.Trainer) -> Mapping[str, str]:
    """Strategy, compressor and aggregator by name."""
    strategy: object = trainer.strategy
    if isinstance(strategy, Described):
        return strategy.describe()
    plugin: object = trainer.precision_plugin
    compressor = plugin.compressor if isinstance(plugin, Compressing) else None
    name = "none" if compressor is None else registry.name(compressor)
    return {"strategy": type(strategy).__name__, "compressor": name, "aggregator": "mean"}


def _mean_over_ranks(trainer: pl.Trainer, values: list[float]) -> list[float]:
    dtype = torch.float32 if trainer.strategy.root_device.type == "mps" else torch.float64
    tensor = torch.tensor(values, dtype=dtype, device=trainer.strategy.root_device)
    reduced = trainer.strategy.reduce(tensor, reduce_op="mean")
    return [float(value) for value in torch.as_tensor(reduced)]


def _report(trainer: pl.Trainer) -> dict[str, float] | None:
    strategy: object = trainer.strategy
    if not isinstance(strategy, Reporting):
        return None
    report = dict(strategy.report)
    means = _mean_over_ranks(trainer, list(report.values()))
    largest = trainer.strategy.reduce(
        torch.tensor(list(report.values()), device=trainer.strategy.root_device), reduce_op="max"
    )
    pairs = zip(report, means, torch.as_tensor(largest).tolist(), strict=True)
    return {name: round(top if name.endswith("_max") else mean, 3) for name, mean, top in pairs}


def _finite(value: Tensor | float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def _versions() -> dict[str, str]:
    packages = ("torch", "lightning", "hydra-core", "lightning-sync")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _readable(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return str(value)
