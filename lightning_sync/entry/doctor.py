"""The command ``lightning-sync doctor``: can this job train, and which mode would pay?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_sync.cluster.preflight import PreflightError, preflight
from lightning_sync.cluster.slurm import current_job

_EXAMPLES = """examples:
  srun lightning-sync doctor                                    inside an allocation, as training would be started
  lightning-sync doctor --probe model=byte_lm data=python_source trainer.devices=2
  srun lightning-sync doctor --probe model=byte_lm trainer.num_nodes=2 trainer.devices=4

--probe trains a few steps of a configuration of lightning_sync.train without communication, measures links and
compressors, and prints what every mode would cost and which one pays. In your own script the callback
lightning_sync.Probe does the same.
"""


def main(arguments: Sequence[str]) -> int:
    """Check, or probe.

    Args:
        arguments: The command line after ``doctor``.

    Returns:
        0, or 1 if the job cannot run.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-sync doctor",
        description="Check a SLURM job before any process group exists; run it as you run training.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--probe", nargs=argparse.REMAINDER, metavar="OVERRIDE", help="which mode pays, see below")
    parser.add_argument("--run-dir", default="runs/doctor", help="the run directory that training would have")
    parser.add_argument("--devices", type=int, help="the Trainer's devices; by default the tasks per node")
    parser.add_argument("--num-nodes", type=int, help="the Trainer's nodes; by default the job's")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cuda", "gpu", "cpu"))
    parser.add_argument("--measure-mb", type=int, default=16, help="MB per node to measure the network with; 0: none")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for all ranks to arrive")
    options = parser.parse_args(arguments)
    if options.probe is not None:
        from lightning_sync.monitor.probe import main as probe  # imports Lightning

        probe(options.probe)
        return 0
    return _check(options)


def _check(options: argparse.Namespace) -> int:
    job = current_job()
    if job is None:
        print(
            "lightning-sync doctor: this is no SLURM job; run it with srun, as you run training, or see --probe.",
            file=sys.stderr,
        )
        return 1
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
        return 1
    if job.rank == 0:
        print("\n".join([*report.rows, "lightning-sync doctor: this job can train"]))
    return 0
