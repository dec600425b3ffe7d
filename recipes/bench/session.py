"""What bench.py and bytes.py share: options, starting the ranks, running the trials in them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hosts import Hosts
from launch import run_ranks
from methods import find, load_plugin
from trial import Job, read_trial, run_trials

from models import MODELS

CAPTION = "CPU, gloo, emulated links; NCCL not measured"
FOLDER_VARIABLE = "LIGHTNING_SYNC_BENCH_FOLDER"
PLAN = "plan.json"
SPARE = 60.0  # seconds for starting Python in all ranks


def add_job_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options that describe a trial; `defaults` as for `set_defaults`."""
    parser.add_argument("--model", choices=sorted(MODELS), default="emu", help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="hidden size, a multiple of 32 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks (default: %(default)s)")
    parser.add_argument("--compute-ms", type=float, default=100, help="`emu`'s sleep per step (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the measured ones (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps per round (default: %(default)s)")
    parser.add_argument("--deadline", type=float, default=120, help="seconds for one trial (default: %(default)s)")
    parser.add_argument("--plugin", type=Path, action="append", default=[], help="a file that registers methods")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.set_defaults(**defaults)


def job_from(chosen: argparse.Namespace) -> Job:
    """The job that the options describe.

    Raises:
        ValueError: An option is out of range.
    """
    for name, least in (("warmup", 1), ("steps", 1), ("layers", 1), ("compute_ms", 0), ("deadline", 1)):
        value = getattr(chosen, name)
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')}={value!r} is not accepted: at least {least}.")
    if chosen.width < 32 or chosen.width % 32:
        raise ValueError(f"--width={chosen.width!r} is not accepted: a positive multiple of 32.")
    return Job(
        chosen.model, chosen.width, chosen.layers, chosen.compute_ms, chosen.warmup, chosen.steps, chosen.deadline
    )


class Session:
    """A folder with a plan that the ranks of one launch carry out, and with what they measured.

    Args:
        trials: Names of the methods to run, in order.
        job: What all trials have in common.
        plugins: Files that register methods.
    """

    def __init__(self, trials: Sequence[str], job: Job, plugins: Sequence[Path]) -> None:
        self.trials = list(trials)
        self.job = job
        self.plugins = [str(file.resolve()) for file in plugins]
        self.folder = Path(tempfile.mkdtemp(prefix="lsync-bench-"))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def run(self, hosts: Hosts | None, ranks_per_host: int) -> int:
        """Run all trials in one process per rank; returns the launcher's status (0: the ranks got to the end)."""
        plan = {"trials": self.trials, "job": asdict(self.job), "plugins": self.plugins}
        (self.folder / PLAN).write_text(json.dumps(plan))
        return run_ranks(
            [__file__],
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            deadline=SPARE + len(self.trials) * (self.job.deadline + 5),
            logs=self.folder / "logs",
            environment={FOLDER_VARIABLE: str(self.folder), "TORCH_CPP_LOG_LEVEL": "ERROR"},  # hosts have no names
        )

    def measured(self, number: int) -> tuple[list[dict[str, Any]], str | None]:
        """Results of a trial by rank, and why it failed, if it did; see `read_trial`."""
        return read_trial(self.folder, number)


def _run_rank() -> None:
    folder = Path(os.environ[FOLDER_VARIABLE])
    plan = json.loads((folder / PLAN).read_text())
    for file in plan["plugins"]:
        load_plugin(Path(file))
    run_trials([find(name) for name in plan["trials"]], Job(**plan["job"]), folder)


if __name__ == "__main__":
    _run_rank()
