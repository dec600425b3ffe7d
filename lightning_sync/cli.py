"""The command ``lightning-sync``."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the package's commands.

    Args:
        arguments: The command line without the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog="lightning-sync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # --help after "train" belongs to Hydra, which lists the groups and their choices.
    commands.add_parser("train", add_help=False, help="train a model: python -m lightning_sync.train")
    _, rest = parser.parse_known_args(arguments)
    sys.argv[1:] = rest
    # Further ranks are started by the name of __main__, which must therefore be the module and not this script.
    runpy.run_module("lightning_sync.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
