#!/usr/bin/env python3
"""Time to a loss: the byte model really trains between emulated hosts, with one method after the other.

    sudo python recipes/bench/race.py --hosts 4 --rate 100mbit
    sudo python recipes/bench/race.py --hosts 4 --rate 1gbit --methods ddp5-fp16 strict:bf16 diloco:int8 --plot race.png

The loss to reach is what plain averaging has after `--until` steps; that run has no limit on its links, since losses do
not depend on them. Every method has the same model, data, seed, schedule and steps at most. Validation is not on the
clock. The table has each method's time to that loss, its steps, and its time per step; compute alone is printed.
CPU, gloo, emulated links; NCCL not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hosts import UNLIMITED, Hosts, HostsError, ending_on_sigterm
from launch import run_ranks
from methods import find, load_plugin
from session import CAPTION

METHODS = (
    *("ddp5-fp16", "torch-powersgd1", "strict:bf16", "strict:PowerSGD(rank=4,warmup_steps=20)"),
    *("delayed:PowerSGD(rank=4,warmup_steps=20)", "diloco(sync_every=16,warmup_steps=20):int8"),
    "streaming_diloco(sync_every=16,warmup_steps=20,fragments=4,overlap_steps=3):int8",
)
REFERENCE = "strict"
HERE = Path(__file__).resolve()


def leg(options: argparse.Namespace) -> None:
    """One rank of one method."""
    import torch
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import Callback

    from lightning_sync.examples.byte_lm import ByteLM
    from lightning_sync.examples.python_source import PythonSource

    class Clock(Callback):
        """Seconds of training, validation left out, at every validation."""

        def __init__(self) -> None:
            self.curve: list[tuple[int, float, float]] = []
            self.seconds, self.since = 0.0, 0.0

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.strategy.barrier("start")
            self.since = time.perf_counter()

        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seconds += time.perf_counter() - self.since if self.since else 0.0

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            loss = float(trainer.callback_metrics["val_loss"])
            self.curve.append((trainer.global_step, self.seconds, loss))
            if options.target is not None and loss <= options.target:
                trainer.should_stop = True
            self.since = time.perf_counter()

    torch.set_num_threads(1)
    seed_everything(options.seed, verbose=False)
    clock = Clock()
    method = find(options.leg)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=1 if method.alone else options.hosts,
        strategy=method.make(),
        callbacks=[clock],
        max_steps=options.steps,
        val_check_interval=options.every,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = ByteLM(width=options.width, depth=options.depth, context=options.length, lr=options.lr)
    data = PythonSource(batch_size=options.batch, length=options.length, val_sequences=128)
    trainer.fit(model, datamodule=data)
    if trainer.global_rank == 0:
        found = {"curve": clock.curve, "parameters": sum(p.numel() for p in model.parameters())}
        Path(options.out).write_text(json.dumps(found))


def train(name: str, hosts: Hosts, options: argparse.Namespace, folder: Path, target: float | None) -> dict[str, Any]:
    """Run one method in all hosts; an empty curve if it failed."""
    out = folder / "curve.json"
    out.unlink(missing_ok=True)
    words = [str(HERE), "--leg", name, "--out", str(out)]
    for key in ("steps", "every", "width", "depth", "length", "batch", "lr", "seed"):
        words += [f"--{key}", str(getattr(options, key))]
    words += ["--hosts", str(options.hosts), *(["--target", str(target)] if target is not None else [])]
    words += [word for file in options.plugin for word in ("--plugin", str(file))]
    status = run_ranks(words, hosts=hosts, ranks_per_host=1, deadline=options.deadline, logs=folder / "logs")
    if status or not out.exists():
        return {"curve": [], "parameters": 0}
    return dict(json.loads(out.read_text()))


def reached(curve: list[tuple[int, float, float]], target: float) -> tuple[float, float] | None:
    """Seconds and steps at which the loss fell to the target, between two validations by a straight line."""
    before: tuple[int, float, float] | None = None
    for step, seconds, loss in curve:
        if loss <= target:
            if before is None or before[2] <= target:
                return seconds, step
            part = (before[2] - target) / (before[2] - loss)
            return before[1] + part * (seconds - before[1]), before[0] + part * (step - before[0])
        before = (step, seconds, loss)
    return None


def plot(file: Path, curves: dict[str, list[tuple[int, float, float]]], target: float, title: str) -> None:
    """Loss against seconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, curve in curves.items():
        axes.plot([s for _, s, _ in curve], [loss for _, _, loss in curve], label=name, linewidth=1.6)
    axes.axhline(target, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds of training", ylabel="validation loss, nats per byte", title=title, xscale="log")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="as for bench.py")
    parser.add_argument("--until", type=int, default=300, help="the reference's steps")
    parser.add_argument("--steps", type=int, default=600, help="of every method at most; the schedule ends there")
    parser.add_argument("--every", type=int, default=25, help="steps between two validations")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=3600, help="seconds for one method")
    parser.add_argument("--plugin", type=Path, action="append", default=[], help="a file that registers methods")
    parser.add_argument("--json", type=Path, help="keep everything here")
    parser.add_argument("--plot", type=Path, help="a picture of loss against time")
    parser.add_argument("--leg", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=float, help="loss to reach, instead of the reference's")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for file in options.plugin:
        load_plugin(file)
    if options.leg:
        leg(options)
        return 0
    curves: dict[str, list[tuple[int, float, float]]] = {}
    with ending_on_sigterm(), tempfile.TemporaryDirectory() as place, Hosts(options.hosts, UNLIMITED) as hosts:
        folder = Path(place)
        target = options.target
        alone = train("none", hosts, argparse.Namespace(**{**vars(options), "steps": 2 * options.every}), folder, None)
        if target is None:
            reference = train(REFERENCE, hosts, options, folder, None)["curve"]
            target = next(loss for step, _, loss in reference if step >= options.until)
        compute = alone["curve"][-1][1] / alone["curve"][-1][0]
        title = f"{options.hosts} hosts, {options.rate}, {alone['parameters'] / 1e6:.1f} M parameters"
        print(f"{title}; compute alone {1e3 * compute:.0f} ms a step. {CAPTION}.")
        print(
            f"Loss to reach: {target:.4f}.\n\n| method | seconds | steps | ms per step |\n|---|---|---|---|", flush=True
        )
        hosts.set_rate(options.rate)
        for name in options.methods:
            curve = curves[name] = train(name, hosts, options, folder, target)["curve"]
            found = reached(curve, target)
            if not curve:
                print(f"| `{name}` | failed | | |", flush=True)
                continue
            each = 1e3 * curve[-1][1] / curve[-1][0]
            how = f"{found[0]:.0f} | {found[1]:.0f}" if found else f"not in {curve[-1][1]:.0f} | {curve[-1][0]}"
            print(f"| `{name}` | {how} | {each:.0f} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"target": target, "compute": compute, "curves": curves}, indent=1) + "\n")
    if options.plot is not None:
        plot(options.plot, curves, target, title)
    return int(not all(curves.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (HostsError, ValueError) as error:
        sys.exit(f"race: {error}")
