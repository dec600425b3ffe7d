"""The callback `SyncMonitor`: what synchronisation costs, logged, shown and written down while training runs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_sync.checks import check_integer
from lightning_sync.comm.counters import Counters
from lightning_sync.monitor.records import FOLDER, FORMAT, Recorder
from lightning_sync.monitor.summary import counters_of, names_of

_MB = 1e6
#: Totals that a record holds, and the `Counters` they are read from.
_SECONDS = ("wait_seconds", "encode_seconds", "wire_seconds", "decode_seconds")
_COUNTS = ("steps", "skipped_steps", "exchanges", "collectives", "messages")
#: What the progress bar shows of a mode's own numbers.
_SHOWN = ("period", "staleness", "clock_lead")


@runtime_checkable
class Telling(Protocol):
    """A strategy that knows something of itself. Lightning's own do not."""

    def telemetry(self) -> Mapping[str, float | Tensor]:
        """Numbers of this rank as they are now, by name."""
        ...


class SyncMonitor(pl.Callback):
    r"""Logs what synchronisation costs, every few steps, and writes it down on every rank.

    Per step, as means since the record before, on rank 0, through whatever loggers the Trainer has:
    ``sync/wire_mb_per_step`` (MB of 10^6 bytes that this rank sent to others), ``sync/network_mb_per_step`` (those to
    other nodes, if there are any), ``sync/compression_ratio``, ``sync/wait_seconds``, ``sync/encode_seconds``,
    ``sync/wire_seconds``, ``sync/decode_seconds`` (see `Counters`), ``sync/overlapped_seconds`` (encode + wire + decode
    - wait, at least 0), ``sync/step_seconds``, ``sync/wait_share`` (wait over step), ``sync/samples_per_second`` (this
    rank's times the number of ranks; the report adds up what every rank had). As they are: ``sync/exchanges`` and what
    the strategy knows of itself, such as ``sync/residual_norm``, ``sync/period``, ``sync/consensus_distance`` or
    ``sync/staleness``. What does not apply, or cannot be measured, is left out.

    The progress bar shows ``MB/step``, ``waiting`` (the share) and the period or staleness. ``lightning-sync report``
    makes a page of the files. No collective is issued. On a GPU the host stops once per record, for the loss and the
    strategy's numbers, never in between.

    Args:
        directory: Where every rank appends to ``rank-N.jsonl``, see `lightning_sync.monitor.records`. `None`:
            ``telemetry`` in the logger's directory, without a logger in ``default_root_dir``.
        every_n_steps: Optimiser steps between two records. `None`: the Trainer's ``log_every_n_steps``, or 50 if that
            is 0. Smaller shows more and costs more: a record is one pass over residuals.
        progress_bar: Whether the progress bar shows anything of this.

    Raises:
        ValueError: for a wrong number, at construction.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        every_n_steps: int | None = None,
        progress_bar: bool = True,
    ) -> None:
        if every_n_steps is not None:
            check_integer("SyncMonitor", 1, every_n_steps=every_n_steps)
        self.directory = None if directory is None else Path(directory)
        self.every_n_steps = every_n_steps
        self.progress_bar = progress_bar
        self._folder: Path | None = None
        self._recorder: Recorder | None = None
        self._every = 1
        self._last: dict[str, Any] = {}
        self._losses: list[Tensor] = []
        self._began = self._mark = 0.0
        self._stepping_seconds = 0.0
        self._samples = 0

    # ---- Lightning ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Agree on the directory, while ranks may still talk to each other."""
        if stage == "fit":
            home = trainer.log_dir if self.directory is None else None
            self._folder = self.directory or Path(home or trainer.default_root_dir) / FOLDER

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the file and start the clock."""
        assert self._folder is not None
        self._recorder = Recorder(self._folder, trainer.global_rank)
        self._every = self.every_n_steps or getattr(trainer, "log_every_n_steps", 0) or 50
        self._losses, self._samples, self._stepping_seconds = [], 0, 0.0
        self._began = self._mark = time.perf_counter()
        about = {
            "format": FORMAT,
            "time": time.time(),
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            **{name: names_of(trainer)[name] for name in ("strategy", "compressor", "aggregator")},
            "precision": str(trainer.precision),
            "device": trainer.strategy.root_device.type,
        }
        self._last = self._totals(trainer)
        self._recorder.write("start", {**about, **self._last})

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What lies between two epochs is not time of a step."""
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note time, samples and loss; every few steps, make a record of it."""
        now = time.perf_counter()
        self._stepping_seconds += now - self._mark
        self._mark = now
        self._samples += _samples_in(batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        if trainer.global_step - self._last["step"] >= self._every:
            self._record(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write down what validation has found; its time is not time of a step."""
        if self._recorder is not None and not trainer.sanity_checking:
            found = {name: float(v) for name, v in trainer.callback_metrics.items() if str(name).startswith("val")}
            place = {"step": trainer.global_step, "seconds": time.perf_counter() - self._began}
            self._recorder.write("validation", {**place, **found})
            self._mark = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the last record."""
        if self._recorder is not None:
            if trainer.global_step > self._last["step"]:
                self._record(trainer, pl_module)
            self._recorder.write("end", self._totals(trainer))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the file, however training has ended."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    # ---- records -----------------------------------------------------------------------------------------------------

    def _totals(self, trainer: pl.Trainer) -> dict[str, Any]:
        counters = counters_of(trainer)
        own: dict[str, Any] = {
            "step": trainer.global_step,
            "seconds": time.perf_counter() - self._began,
            "stepping_seconds": self._stepping_seconds,
            "samples": self._samples,
        }
        return own if counters is None else own | totals(counters)

    def _record(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._recorder is not None
        now = self._totals(trainer)
        told: object = trainer.strategy
        gauges = _read({"loss": _mean(self._losses), **(told.telemetry() if isinstance(told, Telling) else {})})
        self._losses = []
        self._recorder.write("step", {**now, **gauges})
        if trainer.is_global_zero:
            metrics = per_step(self._last, now, trainer.world_size)
            own = {name: value for name, value in gauges.items() if name != "loss"}
            logged = {f"sync/{name}": value for name, value in {**metrics, **own}.items()}
            for logger in trainer.loggers:
                logger.log_metrics(logged, step=trainer.global_step)
            if self.progress_bar and trainer.progress_bar_callback is not None:
                shown = {"MB/step": metrics.get("wire_mb_per_step"), "waiting": metrics.get("wait_share")}
                shown |= {name: own[name] for name in _SHOWN if name in own}
                values = {name: value for name, value in shown.items() if value is not None}
                pl_module.log_dict(values, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)
        self._last = now
        self._mark = time.perf_counter()  # what this has cost is no step's


def totals(counters: Counters) -> dict[str, Any]:
    """The totals that a record holds: counts, whole bytes, and seconds (`None` where they cannot be measured)."""
    found: dict[str, Any] = {name: getattr(counters, name) for name in (*_COUNTS, *_SECONDS)}
    found["sent_bytes"], found["network_bytes"] = counters.wire_bytes, counters.network_bytes
    dense = counters.dense
    found["dense_bytes"], found["dense_network_bytes"] = round(dense.sent), round(Fraction(dense.network))
    return found


def per_step(before: Mapping[str, Any], after: Mapping[str, Any], ranks: int = 1) -> dict[str, float]:
    """Means per step between two records of a rank, by the names that `SyncMonitor` documents.

    Args:
        before: The earlier one.
        after: The later one, at least one step on.
        ranks: By how much samples per second are multiplied.

    Returns:
        What applies and can be measured.
    """
    steps = max(1, after["step"] - before["step"])

    def gained(name: str) -> float | None:
        if after.get(name) is None:
            return None
        return float(after[name]) - float(before.get(name) or 0)

    found: dict[str, float | None] = {"step_seconds": (stepping := gained("stepping_seconds") or 0.0) / steps}
    samples = gained("samples")
    if samples and stepping > 0:
        found["samples_per_second"] = ranks * samples / stepping
    sent, network = gained("sent_bytes"), gained("network_bytes")
    if sent is not None:
        found["wire_mb_per_step"] = sent / _MB / steps
    if network and network > 0:
        found["network_mb_per_step"] = network / _MB / steps
    for part, dense in ((network, "dense_network_bytes"), (sent, "dense_bytes")):
        if part and part > 0 and "compression_ratio" not in found:
            found["compression_ratio"] = (gained(dense) or 0.0) / part
    seconds = {name: gained(name) for name in _SECONDS}
    found |= {name: None if value is None else value / steps for name, value in seconds.items()}
    wait = seconds["wait_seconds"]
    if wait is not None and stepping > 0:
        found["wait_share"] = min(1.0, wait / stepping)
    busy = [seconds[name] for name in _SECONDS[1:]]
    if wait is not None and None not in busy:
        found["overlapped_seconds"] = max(0.0, sum(b for b in busy if b is not None) - wait) / steps
    if after.get("exchanges"):
        found["exchanges"] = float(after["exchanges"])
    return {name: value for name, value in found.items() if value is not None}


def _samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch: 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for part in parts if (found := _samples_in(part))), 0)


def _mean(losses: list[Tensor]) -> float | Tensor:
    return torch.stack(losses).float().mean() if losses else float("nan")


def _read(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Numbers of all these; scalar tensors of a device are fetched together, in one stop of the host."""
    tensors = {name: v.detach() for name, v in values.items() if isinstance(v, Tensor)}
    found = {name: float(v) for name, v in values.items() if not isinstance(v, Tensor)}
    for device in {t.device for t in tensors.values()}:
        names = [name for name, t in tensors.items() if t.device == device]
        found |= dict(zip(names, torch.stack([tensors[n].float() for n in names]).tolist(), strict=True))
    return found
