"""What the learning recipes share: runs of `lightning_sync.train`, each in processes of its own and done once."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def train(run_dir: Path, *overrides: str) -> dict[str, Any] | None:
    """The summary of a run; trains it unless it is there already. `None`, and a word on stderr, if it fails."""
    summary = run_dir / "summary.json"
    if not summary.exists():
        # Of several overrides of one key the last counts, so that a mode may change what all runs have in common.
        words = {word.split("=")[0]: word for word in (f"run_dir={run_dir}", *_QUIET, *overrides)}
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = run_dir.parent / f"{run_dir.name}.log"
        with log.open("w") as stream:
            done = subprocess.run(
                [sys.executable, "-m", "lightning_sync.train", *words.values()],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_PATH)},
                check=False,
            )
        if done.returncode:
            print(f"{run_dir.name}: exit code {done.returncode}, see {log}", file=sys.stderr)
            return None
    return dict(json.loads(summary.read_text()))


_PATH = [str(Path(__file__).parent / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])]
_QUIET = ("trainer.enable_progress_bar=false", "~callbacks.checkpoint", "trainer.enable_checkpointing=false")


def curve(run_dir: Path, metric: str = "val_loss") -> dict[int, float]:
    """What a run logged of a metric, by step."""
    with (run_dir / "csv" / "version_0" / "metrics.csv").open() as stream:
        return {int(row["step"]) + 1: float(row[metric]) for row in csv.DictReader(stream) if row.get(metric)}


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Their mean, and the largest minus the smallest."""
    return statistics.mean(values), max(values) - min(values)
