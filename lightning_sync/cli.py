"""The command ``lightning-sync``."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence

# What each command does, and the module whose `main(arguments)` does it; "" is done here. Modules are imported when
# they are needed.
_COMMANDS = {
    "train": ("train a model: python -m lightning_sync.train", ""),
    "report": ("make a page with figures about runs", "lightning_sync.monitor.report"),
    "doctor": (
        "check a SLURM job before it trains; with --probe: which mode pays here",
        "lightning_sync.entry.doctor",
    ),
    "simulate": (
        "what a bound on staleness or a quorum would do to a cluster, in virtual time",
        "lightning_sync.asynchronous.simulate",
    ),
    "inspect": ("check and print the state of the ranks beside a checkpoint", ""),
}
_EXAMPLES = """examples:
  lightning-sync train strategy=diloco compressor=int8 trainer.max_steps=2000 run_dir=runs/diloco
  srun lightning-sync doctor
  lightning-sync doctor --probe model=byte_lm data=python_source trainer.devices=2
  lightning-sync simulate --replicas 16 --stall-share 0.05
  lightning-sync report runs/ddp runs/diloco -o report
  lightning-sync inspect runs/diloco/checkpoints/last.ckpt

lightning-sync COMMAND --help says more.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the package's commands.

    Args:
        arguments: The command line without the program's name; None takes the process's own.

    Raises:
        SystemExit: with the command's exit code, unless that is 0.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-sync",
        description="Commands of lightning_sync.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what, _) in _COMMANDS.items():
        commands.add_parser(name, add_help=False, help=what)
    given = sys.argv[1:] if arguments is None else list(arguments)
    known, rest = parser.parse_args(given[:1]), given[1:]  # whatever follows, --help included, is the command's
    if known.command == "train":
        sys.argv[1:] = rest
        # Further ranks are started by the name of __main__, which must therefore be the module and not this script.
        runpy.run_module("lightning_sync.train", run_name="__main__", alter_sys=True)
    elif known.command == "inspect":
        _inspect(rest)
    else:
        code = importlib.import_module(_COMMANDS[known.command][1]).main(rest)
        if code:
            raise SystemExit(code)


def _inspect(arguments: Sequence[str]) -> None:
    from lightning_sync.checkpoint.describe import describe
    from lightning_sync.checkpoint.plain import StateFileError

    parser = argparse.ArgumentParser(
        prog="lightning-sync inspect",
        description="Check every file of the ranks' state beside a checkpoint, and print what is in it.",
        epilog="example:\n  lightning-sync inspect runs/diloco/checkpoints/last.ckpt\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="the checkpoint, or the folder CHECKPOINT.sync")
    chosen = parser.parse_args(arguments)
    try:
        print(describe(chosen.path))
    except StateFileError as error:
        print(f"lightning-sync inspect: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
