"""The command ``lightning-sync``."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from lightning_sync.asynchronous import simulate
from lightning_sync.checkpoint.describe import describe
from lightning_sync.checkpoint.plain import StateFileError


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
    simulation = commands.add_parser("simulate", help="what a bound or a quorum would do to a cluster, in virtual time")
    simulate.add_arguments(simulation)
    known, rest = parser.parse_known_args(arguments)
    if known.command == "inspect":
        _refuse(parser, rest)
        _inspect(known.path)
        return
    if known.command == "simulate":
        _refuse(parser, rest)
        try:
            simulate.simulate(known)
        except ValueError as error:
            simulation.error(str(error))
        return
    sys.argv[1:] = rest
    # Further ranks are started by the name of __main__, which must therefore be the module and not this script.
    runpy.run_module("lightning_sync.train", run_name="__main__", alter_sys=True)


def _refuse(parser: argparse.ArgumentParser, rest: list[str]) -> None:
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")


def _inspect(path: str) -> None:
    try:
        print(describe(path))
    except StateFileError as error:
        print(f"lightning-sync inspect: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
