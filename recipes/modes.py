#!/usr/bin/env python3
"""Does meeting less often cost learning? Trains the byte model in every mode and compares validation losses.

    python recipes/modes.py --grid                   # first: every learning rate, one seed, half the steps
    python recipes/modes.py                          # everything: hours on 2 cores
    python recipes/modes.py --modes strict diloco64 --seeds 0 --steps 500

Every run is `python -m lightning_sync.train` in 4 processes (one without others for the row "alone"), equal steps and
tokens, the same strict warm-up. Learning rates are chosen on one grid that is the same for all modes, strict included:
`--lr MODE=RATE` says what was chosen. Runs that are there already are not repeated. The table shows the mean validation
loss over the seeds at the end of training, its distance from strict, the seeds' spread, bytes per rank and step, and
the distance from strict along the way.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runs import curve, mean_and_spread, train

WARMUP = 300
GRID = (2e-3, 4e-3)
_WARM = f"strategy.warmup_steps={WARMUP}"
MODES: dict[str, tuple[str, ...]] = {
    "strict": ("strategy=strict",),
    "diloco64": ("strategy=diloco", _WARM, "strategy.sync_every=64"),
    "local_sgd64": ("strategy=local_sgd", _WARM, "strategy.sync_every=64"),
    "diloco16": ("strategy=diloco", _WARM, "strategy.sync_every=16"),
    "local_sgd16": ("strategy=local_sgd", _WARM, "strategy.sync_every=16"),
    "local_sgd8": ("strategy=local_sgd", _WARM, "strategy.sync_every=8"),
    "streaming64": ("strategy=streaming_diloco", _WARM, "compressor=int8"),
    "slowmo": ("strategy=slowmo", _WARM),
    "delayed": ("strategy=delayed",),
    "alone": ("strategy=strict", "trainer.devices=1"),
}


class Runs:
    """The runs of one folder; sizes and steps come from the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def folder(self, mode: str, rate: float, seed: int, steps: int) -> Path:
        """Where a run is."""
        return Path(self.options.out) / f"{mode}-{rate:g}-{self.options.batch}x{self.options.length}-{steps}-{seed}"

    def run(self, mode: str, rate: float, seed: int, steps: int) -> dict[str, Any] | None:
        """Its summary."""
        batch, length = self.options.batch, self.options.length
        return train(
            self.folder(mode, rate, seed, steps),
            *("data=python_source", f"data.batch_size={batch}", f"data.length={length}"),
            *("model=byte_lm", f"model.context={length}", f"model.lr={rate}", f"seed={seed}"),
            *("trainer.devices=4", f"trainer.max_steps={steps}", f"trainer.val_check_interval={self.options.every}"),
            *("trainer.check_val_every_n_epoch=null", *MODES[mode]),
        )


def show_grid(runs: Runs) -> None:
    """Train every mode with every rate, one seed, half the steps."""
    for mode in runs.options.modes:
        rows = {rate: runs.run(mode, rate, 0, runs.options.steps // 2) for rate in GRID}
        print(mode, " ".join(f"{rate:g}: {row['val_loss']:.4f}" for rate, row in rows.items() if row), flush=True)


def show_table(runs: Runs, chosen: dict[str, float]) -> bool:
    """Train and compare; returns whether all runs ended well."""
    options, reference, complete = runs.options, None, True
    along = [s for s in range(options.every, options.steps, options.every) if s > WARMUP]
    print(f"| mode | rate | val loss | spread | against strict | bytes per step | at {', '.join(map(str, along))} |")
    print("|---|---|---|---|---|---|---|")
    for mode in options.modes:
        rate = chosen.get(mode, options.rate)
        places = [runs.folder(mode, rate, seed, options.steps) for seed in options.seeds]
        summaries = [runs.run(mode, rate, seed, options.steps) for seed in options.seeds]
        done = [(row, place) for row, place in zip(summaries, places, strict=True) if row is not None]
        complete &= len(done) == len(places)
        if not done:
            continue
        loss, spread = mean_and_spread([row["val_loss"] for row, _ in done])
        curves = [curve(place) for _, place in done]
        path = {step: mean_and_spread([c[step] for c in curves])[0] for step in along}
        reference = reference or (loss, path)
        gaps = " ".join(f"{100 * (value / reference[1][step] - 1):+.1f}" for step, value in path.items())
        print(
            f"| {mode} | {rate:g} | {loss:.4f} | {spread:.4f} | {100 * (loss / reference[0] - 1):+.2f} % "
            f"| {done[0][0]['wire_bytes_per_step'] or 0:,.0f} | {gaps} |",
            flush=True,
        )
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=250, help="steps between two validations")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--grid", action="store_true", help="every learning rate of the grid, one seed, half the steps")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--lr", nargs="*", default=[], metavar="MODE=RATE", help="learning rates of single modes")
    parser.add_argument("--out", type=Path, default=Path("quality-results"))
    options = parser.parse_args()
    if options.grid:
        show_grid(Runs(options))
        return 0
    chosen = {mode: float(rate) for mode, rate in (pair.split("=") for pair in options.lr)}
    return 0 if show_table(Runs(options), chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
