#!/usr/bin/env python3
"""Does compression cost learning? Trains both examples with every compressor and compares validation losses.

    python recipes/quality.py                                   # everything, three seeds: hours on 2 cores
    python recipes/quality.py --tasks digits --seeds 0 1 2 --steps 300
    python recipes/quality.py --out quality-results             # continues where a run was stopped

Every run is `python -m lightning_sync.train strategy=strict compressor=...` in 2 processes, equal steps, equal data,
equal learning rates. The table shows the mean validation loss, its distance from no compression, and the spread of the
seeds, which is what any such distance has to be held against.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runs import mean_and_spread, train

COMPRESSORS = ("none", "bf16", "fp16", "int8", "powersgd")
TASKS: dict[str, dict[str, Any]] = {
    "byte_lm": {"overrides": ["data=python_source", "model=byte_lm"], "steps": 1000, "powersgd": 300},
    "digits": {"overrides": ["experiment=digits"], "steps": 300, "powersgd": 90},
}


def summary(out: Path, task: str, compressor: str, seed: int, steps: int) -> dict[str, Any] | None:
    """Train one run, unless its summary is there already."""
    return train(
        out / f"{task}-{compressor}-{seed}",
        *("strategy=strict", f"compressor={compressor}", *TASKS[task]["overrides"], "logger=none", f"seed={seed}"),
        *([f"compressor.warmup_steps={TASKS[task]['powersgd']}"] if compressor == "powersgd" else []),
        *(f"trainer.max_steps={steps}", "trainer.max_epochs=null"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--compressors", nargs="+", default=list(COMPRESSORS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps of every run (default: 1000 for byte_lm, 300 for digits)")
    parser.add_argument("--out", type=Path, default=Path("quality-results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    missing = False
    print("| task | compressor | val loss, mean | spread | against none | bytes per step | ratio |")
    print("|---|---|---|---|---|---|---|")
    for task in options.tasks:
        steps = options.steps or int(TASKS[task]["steps"])
        reference = None
        for compressor in options.compressors:
            runs = [summary(options.out, task, compressor, seed, steps) for seed in options.seeds]
            done = [r for r in runs if r is not None]
            missing |= len(done) < len(runs)
            if not done:
                continue
            mean, spread = mean_and_spread([r["val_loss"] for r in done])
            reference = reference or mean
            row = done[0]
            print(
                f"| {task} | {compressor} | {mean:.4f} | {spread:.4f} | {100 * (mean / reference - 1):+.2f} % "
                f"| {row['wire_bytes_per_step']:,.0f} | {row['compression_ratio']:.2f} |",
                flush=True,
            )
    return int(missing)


if __name__ == "__main__":
    raise SystemExit(main())
