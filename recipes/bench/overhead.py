#!/usr/bin/env python3
"""What strict mode without a compressor costs beside DDPStrategy: 2 ranks on loopback, no root.

    python recipes/bench/overhead.py
    python recipes/bench/overhead.py --method ddp          # control: DDPStrategy against itself
    python recipes/bench/overhead.py --method drift        # strict comparing replicas in every step, against never
    python recipes/bench/overhead.py --method watchdog     # strict with a watchdog that looks 20 times as often
    python recipes/bench/overhead.py --method telemetry --limit 1.01  # strict with int8, watched by SyncMonitor, or not

In one pair of processes three Trainers take turns, a step each: DDPStrategy, the method, and DDPStrategy again, with
the same model, data and bucket size. A round's ratio is the method's step over the mean of the two DDP steps around it,
so that a machine that slows down or speeds up does not show. The second DDP step over the first is the noise that the
ratio stands in. Exit status 1 if the median of the ratios is above `--limit`.

With `drift` all three are strict mode, and the one in the middle hashes and compares all parameters in every step. By
default that happens every 100 steps and costs a hundredth, which is printed and held against `--limit`.

A watchdog's thread works on while other Trainers have their turn, so with `watchdog` there is one Trainer, whose
watchdog looks as often as by default in one block of steps and 20 times as often in the next. A twentieth of the
difference is printed and held against `--limit`.

With `telemetry` all three are strict mode with int8. The one in the middle measures every phase of its reductions and
has `SyncMonitor`, which makes a record every 10 steps; the others measure no phases and have no callback of ours.

Lightning's own broadcast after every batch belongs to DDPStrategy's steps; strict mode does without it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import run_ranks
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from methods import Method, find
from session import add_job_options, job_from
from trial import Job, Place, make_module, make_trainer, quiet

from models import loader

RANKS = 2
PLAN_VARIABLE = "LIGHTNING_SYNC_OVERHEAD_PLAN"
LIMIT = 1.02
DRIFT_EVERY = 100
LOOKS = 20
BLOCK = 8
RECORD_EVERY = 10


class Turns:
    """Lets one of several threads run at a time, in a fixed order round and round.

    Collectives of all lanes share the default group, and the fixed order is what keeps them in one order on all ranks.

    Args:
        lanes: Number of threads; lane 0 begins.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._current = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def wait(self, lane: int) -> None:
        """Return when it is this lane's turn.

        Raises:
            RuntimeError: Another lane failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._current == lane or self._error is not None)
            if self._error is not None:
                raise RuntimeError("another lane failed") from self._error

    def pass_on(self) -> None:
        """Give the turn to the next lane."""
        with self._changed:
            self._current = (self._current + 1) % self._lanes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make all lanes fail; the first error is kept."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the first error that a lane failed with."""
        if self._error is not None:
            raise self._error


class TurnTaker(Callback):
    """Times every step of a lane, in milliseconds, and passes the turn on after it."""

    def __init__(self, turns: Turns, lane: int, steps: int) -> None:
        self.turns = turns
        self.lane = lane
        self.steps = steps
        self.each: list[float] = []
        self._began = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.each.append(1000 * (time.perf_counter() - self._began))
        if len(self.each) < self.steps:  # after the last step the turn is kept until the Trainer has finished
            self.turns.pass_on()
            self.turns.wait(self.lane)
        self._began = time.perf_counter()


class Blocks(Callback):
    """Times every step, in milliseconds; in every second block of steps the watchdog looks more often."""

    def __init__(self) -> None:
        self.each: list[float] = []
        self._began = 0.0
        self._defaults: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if len(self.each) % BLOCK == 0:
            courier: Any = trainer.strategy._watcher._courier  # type: ignore[attr-defined]
            often = len(self.each) // BLOCK % 2
            for name in ("_interval", "beat_every", "_look_every"):
                first = self._defaults.setdefault(name, getattr(courier, name))
                setattr(courier, name, first / LOOKS if often else first)
            courier.wake()  # the new intervals count from now on
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.each.append(1000 * (time.perf_counter() - self._began))


class Unmeasured(Callback):
    """Takes the measurement of phases out of a strategy of ours."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        counters: Any = trainer.strategy.counters  # type: ignore[attr-defined]
        counters.phase = lambda name: nullcontext()


def alternate(job: Job, place: Place) -> list[list[float]]:
    """Train with a watchdog that looks more often now and then.

    Returns:
        The median steps of blocks: before, while it looks more often, and after.
    """
    steps = job.warmup + job.steps
    blocks = Blocks()
    trainer: Trainer = make_trainer(find("strict"), place, steps, blocks)
    trainer.fit(make_module(job), loader(steps, seed=1000 + place.rank))
    # The first step of a block still sees the interval of the one before.
    starts = range(-(-job.warmup // (2 * BLOCK)) * 2 * BLOCK, steps - BLOCK + 1, BLOCK)
    typical = [statistics.median(blocks.each[start + 1 : start + BLOCK]) for start in starts]
    last = (len(typical) - 1) // 2 * 2
    return [typical[0:last:2], typical[1:last:2], typical[2 : last + 1 : 2]]


def ddp_with_buckets(bucket_mb: float) -> Method:
    """DDPStrategy with a bucket size in MB."""
    return Method(f"ddp@{bucket_mb:g}", lambda: DDPStrategy(bucket_cap_mb=bucket_mb))


def strict_comparing(every: int, bucket_mb: float) -> Method:
    """Strict mode that compares all parameters every so many steps, 0 for never."""
    package = importlib.import_module("lightning_sync")
    options: dict[str, Any] = {"bucket_cap_mb": bucket_mb, "drift_check_every": every}
    return Method(f"strict, drift {every}", lambda: package.strategy("strict", **options))


def lanes_of(name: str, bucket_mb: float) -> list[Method]:
    """The method in the middle of what it is measured against."""
    if name == "drift":
        return [strict_comparing(every, bucket_mb) for every in (0, 1, 0)]
    if name == "telemetry":
        return [find(f"strict:int8@{bucket_mb:g}")] * 3
    ddp = ddp_with_buckets(bucket_mb)
    return [ddp, ddp if name == "ddp" else find(f"{name}@{bucket_mb:g}"), ddp]


def watchers_of(name: str, folder: Path) -> list[Callback | None]:
    """What each lane has beside its clock; what it does in a step counts as part of the step."""
    if name != "telemetry":
        return [None] * 3
    package = importlib.import_module("lightning_sync")
    return [Unmeasured(), package.SyncMonitor(folder, every_n_steps=RECORD_EVERY, progress_bar=False), Unmeasured()]


def take_turns(
    methods: Sequence[Method], watchers: Sequence[Callback | None], job: Job, place: Place
) -> list[list[float]]:
    """Train with all methods at once, a step each in turn.

    Returns:
        For each method the milliseconds of its measured steps.
    """
    steps = job.warmup + job.steps
    turns = Turns(len(methods))
    takers = [TurnTaker(turns, lane, steps) for lane in range(len(methods))]

    def train(lane: int) -> None:
        try:
            turns.wait(lane)
            watcher = watchers[lane]
            callbacks = [takers[lane]] if watcher is None else [watcher, takers[lane]]
            trainer: Trainer = make_trainer(methods[lane], place, steps, *callbacks)
            trainer.fit(make_module(job), loader(steps, seed=1000 + place.rank))
            turns.pass_on()
        except BaseException as error:  # carried to the main thread, which raises it
            turns.fail(error)

    threads = [threading.Thread(target=train, args=(lane,), daemon=True) for lane in range(len(methods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns.check()
    return [taker.each[job.warmup :] for taker in takers]


def run_rank(plan: dict[str, Any]) -> None:
    """What each rank does; rank 0 writes the times of the three lanes."""
    quiet()
    place = Place.read()
    job = Job(**plan["job"])
    if plan["method"] == "watchdog":
        lanes = alternate(job, place)
    else:
        watchers = watchers_of(plan["method"], Path(plan["output"]).parent / "telemetry")
        lanes = take_turns(lanes_of(plan["method"], plan["bucket_mb"]), watchers, job, place)
    if place.rank == 0:
        Path(plan["output"]).write_text(json.dumps(lanes))


def spread(values: Sequence[float]) -> str:
    """The median with its 95 % interval (order statistics, no assumption on the shape), and the middle half."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low, high = (ordered[min(count - 1, max(0, round(count / 2 + side * reach)))] for side in (-1, 1))
    lower, middle, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    return f"median {middle:.4f} (95 %: {low:.4f} to {high:.4f}), middle half {lower:.4f} to {upper:.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description="Paired cost of strict mode beside DDPStrategy on loopback.")
    parser.add_argument("--method", choices=["strict", "ddp", "drift", "watchdog", "telemetry"], default="strict")
    parser.add_argument("--bucket-mb", type=float, default=1, help="bucket size of both (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="accepted median ratio (default: %(default)s)")
    add_job_options(parser, model="lm", width=128, layers=4, warmup=10, steps=300, deadline=300)
    chosen = parser.parse_args(arguments)
    try:
        job = job_from(chosen)
        if job.steps < 2:
            raise ValueError(f"--steps={job.steps!r} is not accepted: at least 2, for a spread.")
        if chosen.bucket_mb <= 0:
            raise ValueError(f"--bucket-mb={chosen.bucket_mb!r} is not accepted: more than 0.")
    except ValueError as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="lsync-overhead-") as folder:
        output = Path(folder) / "lanes.json"
        plan = {
            "job": asdict(job),
            "method": chosen.method,
            "bucket_mb": chosen.bucket_mb,
            "output": str(output),
        }
        status = run_ranks(
            [__file__],
            hosts=None,
            ranks_per_host=RANKS,
            deadline=job.deadline,
            logs=Path(folder) / "logs",
            environment={PLAN_VARIABLE: json.dumps(plan)},
        )
        if status != 0:
            return status
        before, method, after = json.loads(output.read_text())
    ratios = [2 * b / (a + c) for a, b, c in zip(before, method, after, strict=True)]
    noise = [c / a for a, c in zip(before, after, strict=True)]
    others = {"drift": "strict, never comparing", "watchdog": "strict", "telemetry": "strict, unwatched"}
    beside = others.get(chosen.method, "DDPStrategy")
    print(
        f"{job.model} (width {job.width}, {job.layers} layers), {RANKS} ranks, buckets of {chosen.bucket_mb:g} MB, "
        f"{job.steps} rounds. CPU, gloo, loopback; NCCL not measured.\n"
        f"step: {beside} {statistics.median(before):.2f} ms, {chosen.method} {statistics.median(method):.2f} ms\n"
        f"{chosen.method} / {beside}, paired: {spread(ratios)}\n"
        f"noise, {beside} / itself:   {spread(noise)}"
    )
    typical = statistics.median(ratios)
    if chosen.method == "drift":
        typical = 1 + (typical - 1) / DRIFT_EVERY
        print(f"every {DRIFT_EVERY} steps, as by default: {typical:.5f}")
    if chosen.method == "watchdog":
        typical = 1 + (typical - 1) / LOOKS
        print(f"looking as often as by default: {typical:.5f}")
    if chosen.json is not None:
        report = {"job": asdict(job), "bucket_mb": chosen.bucket_mb, "ms": [before, method, after], "ratios": ratios}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    if typical > chosen.limit:
        print(f"overhead: the median ratio is above the limit of {chosen.limit:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if PLAN_VARIABLE in os.environ:
        run_rank(json.loads(os.environ[PLAN_VARIABLE]))
    else:
        sys.exit(main())
