"""Measures a run's steps and its cluster's links, prints what each mode would cost, and stops."""

from __future__ import annotations

import runpy
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import Wires, discover_topology, make_wires
from lightning_sync.compressors import registry
from lightning_sync.compressors.resolve import to_route
from lightning_sync.ddp_hook import param_specs
from lightning_sync.planner.advise import CANDIDATES, Candidate, Prediction, predict_all, recommend
from lightning_sync.planner.measure import measure_codec, measure_links
from lightning_sync.planner.predict import Compute, Link, Traffic
from lightning_sync.reducer import Reducer
from lightning_sync.state import ParamSpec

_NUMBERS = ("MB/step", "wire/compute", "codec ms", "step ms", "step/compute")
_WIDTH = 140
_FREE_OF_COMMUNICATION = (
    *("strategy=local_sgd", "strategy.sync_every=1000000", "logger=none", "run_dir=runs/probe"),
    *("+callbacks.probe._target_=lightning_sync.monitor.probe.Probe", "~callbacks.checkpoint"),
    *("trainer.enable_checkpointing=false", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0"),
)


class Probe(Callback):
    """A callback that times `steps` steps without communication, then the links and codecs, prints advice and stops.

    It wants a strategy that sends nothing in these steps: ``ls.strategy("local_sgd", sync_every=10**6)``, which
    ``lightning-sync doctor --probe`` takes. Parameters change as in any training; use it in a run of its own.

    Args:
        steps: Measured steps, after `warmup`.
        warmup: Steps before, in which memory and kernels settle.
        candidates: What is compared; the first should be ``strict``.
        bucket_cap_mb: Of the strict mode.

    Attributes:
        predictions: What was found, on all ranks.
        advice: The recommendation in a sentence.

    Raises:
        ValueError: if the model is wrapped by DDP, there is only one rank, or the data ends too early.
    """

    def __init__(
        self,
        steps: int = 10,
        warmup: int = 3,
        candidates: Sequence[Candidate] = CANDIDATES,
        bucket_cap_mb: float = 25,
    ) -> None:
        if steps < 1 or warmup < 1:
            raise ValueError(f"Probe(steps={steps!r}, warmup={warmup!r}): both must be 1 or more.")
        self.steps, self.warmup, self.candidates = steps, warmup, tuple(candidates)
        self.bucket_bytes = int(bucket_cap_mb * 2**20)
        self.predictions: list[Prediction] = []
        self.advice = ""
        self._times: list[tuple[float, float, float]] = []
        self._marks: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot be probed."""
        if trainer.world_size < 2:
            raise ValueError("Probe: one rank has nobody to talk to; start it as the run will be, e.g. devices=2.")
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            raise ValueError(
                "Probe: steps must be free of communication, and DDP reduces gradients in each. Use "
                "strategy=ls.strategy('local_sgd', sync_every=10**6), or: lightning-sync doctor --probe"
            )

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self._mark("start")
        self._marks.setdefault("end", self._marks["start"])

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Forward is over."""
        self._mark("forward")

    def on_after_backward(self, *_: Any) -> None:
        """Backward is over."""
        self._mark("backward")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Count the step; after the last one, measure the rest."""
        last = self._marks["end"]  # loading counts
        self._mark("end")
        m = self._marks
        self._times.append((m["forward"] - last, m["backward"] - m["forward"], m["end"] - m["backward"]))
        if len(self._times) == self.warmup + self.steps:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure links and codecs, and print the table."""
        if len(self._times) < self.warmup + self.steps:
            raise ValueError(
                f"Probe: the data ended after {len(self._times)} of {self.warmup + self.steps} steps; "
                "give more data, or fewer steps."
            )
        device = trainer.strategy.root_device
        compute = _slowest(self._times[self.warmup :], device)
        params = [spec for spec, _ in param_specs(pl_module)]
        wires = make_wires(discover_topology(trainer.node_rank, device), Counters())
        try:
            links = measure_links(wires, device)
            between, within = (None if link is None else _slowest_link(link, device) for link in links)
            assert between is not None
            total = sum(p.numel * p.dtype.itemsize for p in params)
            self.predictions = predict_all(
                *(self.candidates, lambda c: traffic(c, params, wires), compute, between, within, total),
                self.bucket_bytes,
            )
            chosen, self.advice = recommend(self.predictions)
            if trainer.is_global_zero:
                show(self.predictions, chosen, self.advice, compute, between, within, total)
        finally:
            wires.close()

    def _mark(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a measurement; nothing in training does this
        self._marks[name] = time.perf_counter()


def traffic(candidate: Candidate, params: Sequence[ParamSpec], wires: Wires) -> Traffic:
    """What one reduction of a candidate sends and costs (collective: the ranks' slowest codec counts)."""
    route = to_route(registry.build(candidate.compressor))
    reducer = Reducer(params, route, wires)
    ranks = (wires.inter or wires.world).size
    dist.barrier()  # codecs of all ranks compete for a host as they will in training
    seconds, rounds = measure_codec(route, params, ranks)
    if wires.intra is not None:
        seconds /= wires.intra.size  # each rank encodes its share
    slowest = torch.tensor([seconds], dtype=torch.float64, device=params[0].device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    own = reducer.predicted_bytes()
    several = len(set(wires.world.topology.nodes)) > 1
    local = float(own.sent - own.network) if several else 0.0
    return Traffic(float(reducer.interface_bytes()), local, rounds, float(slowest))


def _slowest(times: Sequence[tuple[float, float, float]], device: torch.device) -> Compute:
    """Medians of this rank's steps; of those, the slowest rank's (all wait for it)."""
    medians = [statistics.median(t[i] for t in times) for i in range(3)]
    worst = torch.tensor(medians, dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Compute(*worst.tolist())


def _slowest_link(link: Link, device: torch.device) -> Link:
    worst = torch.tensor([1 / link.bytes_per_second, link.round_seconds], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Link(1 / float(worst[0]), float(worst[1]))


def show(
    predictions: Sequence[Prediction],
    chosen: Prediction,
    advice: str,
    compute: Compute,
    between: Link,
    within: Link | None,
    total_bytes: int,
) -> None:
    """Print it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    parts = f"{1e3 * compute.forward:.1f} forward, {1e3 * compute.backward:.1f} backward, "
    console.print(
        f"Compute {1e3 * compute.seconds:.1f} ms a step ({parts}{1e3 * compute.optimizer:.1f} optimiser); gradients of "
        f"{total_bytes / 1e6:.1f} MB. Links: {between.bytes_per_second / 1e6:.0f} MB/s per node"
        + (f", {within.bytes_per_second / 1e6:.0f} MB/s inside" if within is not None else "")
        + f", {1e3 * between.round_seconds:.2f} ms for the smallest round."
    )
    table = Table("", "strategy", *(Column(h, justify="right") for h in _NUMBERS), "price in learning")
    for p in predictions:
        table.add_row(
            "->" if p is chosen else "",
            p.candidate.name,
            f"{p.traffic.interface_bytes / p.candidate.sync_every / 1e6:.2f}",
            f"{p.wire_over_compute:.2f}",
            f"{1e3 * p.traffic.codec_seconds:.1f}",
            f"{1e3 * p.seconds:.1f}",
            f"{p.slowdown:.2f}",
            p.candidate.price,
        )
    console.print(table)
    console.print(advice)


def main(overrides: Sequence[str]) -> None:
    """Probe a configuration of `lightning_sync.train`: ``model=byte_lm data=python_source trainer.num_nodes=2``."""
    sys.argv[1:] = [*_FREE_OF_COMMUNICATION, *overrides]
    runpy.run_module("lightning_sync.train", run_name="__main__", alter_sys=True)
