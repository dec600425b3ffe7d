"""The command ``lightning-sync``."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from lightning_sync.checkpoint.describe import describe
from lightning_sync.checkpoint.plain import StateFileError
from lightning_sync.cluster.preflight import PreflightError, preflight
from lightning_sync.cluster.slurm import current_job


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the package's commands.

    Args:
        arguments: The command line without the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog="lightning-sync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # --help after "train" belongs to Hydra, which lists the groups and their choices.
    commands.add_parser("train", add_help=False, help="train a model: python -m lightning_sync.train")
    inspect = commands.add_parser("inspect", help="check and print the state of the ranks beside a checkpoint")
    inspect.add_argument("path", metavar="PATH", help="the checkpoint, or the folder CHECKPOINT.sync")
    doctor = commands.add_parser(
        "doctor", help="check a SLURM job; run it as you run training: srun lightning-sync doctor"
    )
    doctor.add_argument("--run-dir", default="runs/doctor", help="the run directory that training would have")
    doctor.add_argument("--devices", type=int, help="the Trainer's devices; by default the tasks per node")
    doctor.add_argument("--num-nodes", type=int, help="the Trainer's nodes; by default the job's")
    doctor.add_argument("--accelerator", default="auto", choices=("auto", "cuda", "gpu", "cpu"))
    doctor.add_argument("--measure-mb", type=int, default=16, help="MB per node to measure the network with; 0: none")
    doctor.add_argument("--deadline", type=float, default=60.0, help="seconds for all ranks to arrive")
    known, rest = parser.parse_known_args(arguments)
    if known.command == "inspect":
        if rest:
            parser.error(f"unknown arguments: {' '.join(rest)}")
        _inspect(known.path)
        return
    if known.command == "doctor":
        if rest:
            parser.error(f"unknown arguments: {' '.join(rest)}")
        _doctor(known)
        return
    sys.argv[1:] = rest
    # Further ranks are started by the name of __main__, which must therefore be the module and not this script.
    runpy.run_module("lightning_sync.train", run_name="__main__", alter_sys=True)


def _inspect(path: str) -> None:
    try:
        print(describe(path))
    except StateFileError as error:
        print(f"lightning-sync inspect: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _doctor(options: argparse.Namespace) -> None:
    """Print what every rank found; leave with exit code 1 if the job cannot run."""
    job = current_job()
    if job is None:
        print("lightning-sync doctor: this is no SLURM job; run it with srun, as you run training.", file=sys.stderr)
        raise SystemExit(1)
    try:
        report = preflight(
            options.run_dir,
            devices=options.devices,
            num_nodes=options.num_nodes,
            accelerator=options.accelerator,
            deadline=options.deadline,
            measure_mb=options.measure_mb,
        )
    except PreflightError as error:
        if job.rank == 0:
            print(f"lightning-sync doctor: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if job.rank == 0:
        print("\n".join([*report.rows, "lightning-sync doctor: this job can train"]))


if __name__ == "__main__":
    main()
