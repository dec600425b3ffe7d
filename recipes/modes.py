#!/usr/bin/env python3
"""Does meeting less often cost learning? Trains the byte model in every mode and compares validation losses.

    python recipes/modes.py                          # everything: hours on 2 cores
    python recipes/modes.py --grid                   # first: the learning rates, one seed, half the steps
    python recipes/modes.py --modes strict diloco64 --seeds 0 --steps 500

Every run is `python -m lightning_sync.train` in 4 processes (one without others for the row "alone"), equal steps and
tokens, the same strict warm-up. Learning rates are chosen on one grid that is the same for all modes, strict included;
`--lr MODE=RATE` says what was chosen. Runs that are there already are not repeated. The table shows the mean validation
loss over the seeds at the end of training, its distance from strict, the seeds' spread, and bytes per rank and step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WARMUP = 300
GRID = (1e-3, 2e-3, 4e-3)
_DILOCO = ("strategy=diloco", f"strategy.warmup_steps={WARMUP}")
MODES: dict[str, tuple[str, ...]] = {
    "strict": ("strategy=strict",),
    "local_sgd8": ("strategy=local_sgd", "strategy.sync_every=8", f"strategy.warmup_steps={WARMUP}"),
    "local_sgd16": ("strategy=local_sgd", "strategy.sync_every=16", f"strategy.warmup_steps={WARMUP}"),
    "local_sgd64": ("strategy=local_sgd", "strategy.sync_every=64", f"strategy.warmup_steps={WARMUP}"),
    "diloco16": (*_DILOCO, "strategy.sync_every=16"),
    "diloco64": (*_DILOCO, "strategy.sync_every=64"),
    "streaming64": ("strategy=streaming_diloco", f"strategy.warmup_steps={WARMUP}", "compressor=int8"),
    "slowmo": ("strategy=slowmo", f"strategy.warmup_steps={WARMUP}"),
    "delayed": ("strategy=delayed",),
    "alone": ("strategy=strict", "trainer.devices=1"),
}


def run(out: Path, mode: str, lr: float, seed: int, steps: int, every: int) -> dict[str, float] | None:
    """Train one run, unless its summary is there already."""
    run_dir = out / f"{mode}-lr{lr:g}-{steps}-{seed}"
    path = run_dir / "summary.json"
    if not path.exists():
        command = [
            *(sys.executable, "-m", "lightning_sync.train", "data=python_source", "model=byte_lm"),
            *("data.batch_size=4", "data.length=64", "model.context=64", f"model.lr={lr}", "trainer.devices=4"),
            *(
                f"seed={seed}",
                f"run_dir={run_dir}",
                f"trainer.max_steps={steps}",
                f"trainer.val_check_interval={every}",
            ),
            *("trainer.enable_progress_bar=false", "~callbacks.checkpoint", "trainer.enable_checkpointing=false"),
            *("trainer.check_val_every_n_epoch=null", *MODES[mode]),
        ]
        # The last word counts, also for the number of processes.
        command = list({part.split("=")[0]: part for part in command[3:]}.values())
        command = [sys.executable, "-m", "lightning_sync.train", *command]
        log = out / f"{run_dir.name}.log"
        with log.open("w") as stream:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, check=False)
        if code.returncode:
            print(f"{run_dir.name}: exit code {code.returncode}, see {log}", file=sys.stderr)
            return None
    return json.loads(path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=250, help="steps between two validations")
    parser.add_argument("--grid", action="store_true", help="one seed, half the steps, every learning rate of the grid")
    parser.add_argument("--lr", nargs="*", default=[], metavar="MODE=RATE", help="chosen rates (default: 2e-3)")
    parser.add_argument("--out", type=Path, default=Path("quality-results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {mode: float(rate) for mode, rate in (pair.split("=") for pair in options.lr)}
    if options.grid:
        for mode in options.modes:
            rows = {lr: run(options.out, mode, lr, 0, options.steps // 2, options.every) for lr in GRID}
            print(mode, " ".join(f"{lr:g}: {r['val_loss']:.4f}" for lr, r in rows.items() if r), flush=True)
        return 0
    print("| mode | learning rate | val loss, mean | spread | against strict | bytes per step |")
    print("|---|---|---|---|---|---|")
    reference, missing = None, False
    for mode in options.modes:
        lr = chosen.get(mode, 2e-3)
        runs = [run(options.out, mode, lr, seed, options.steps, options.every) for seed in options.seeds]
        done = [r for r in runs if r is not None]
        missing |= len(done) < len(runs)
        if not done:
            continue
        losses = [r["val_loss"] for r in done]
        mean, spread = statistics.mean(losses), max(losses) - min(losses)
        reference = reference or mean
        sent = done[0]["wire_bytes_per_step"] or 0
        row = f"| {mode} | {lr:g} | {mean:.4f} | {spread:.4f} | {100 * (mean / reference - 1):+.2f} % | {sent:,.0f} |"
        print(row, flush=True)
    return int(missing)


if __name__ == "__main__":
    raise SystemExit(main())
