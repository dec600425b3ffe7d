"""What a bound or a quorum would do to a cluster: every mode on the same stalls and failures, in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lightning_sync.asynchronous import modes
from lightning_sync.asynchronous.cluster import Cluster
from lightning_sync.asynchronous.modes import Mode
from lightning_sync.asynchronous.problems import Logistic, Problem, Quadratic
from lightning_sync.asynchronous.world import Outcome, World

_PROBLEMS = {"quadratic": Quadratic, "logistic": Logistic}
_EPILOG = """modes: strict; ssp:S (bound S, exchanges every step); async or async:H (every H steps);
dylu or dylu:H (every H steps of the fastest, slower ones after fewer);
diloco or diloco:H (everybody meets every H steps); decoupled:Q or decoupled:Q:G (outer steps by a quorum of Q after a
grace window of G usual rounds). Speeds are for good: a bound on staleness cannot make up for them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = _EPILOG
    number = parser.add_argument
    number("--modes", default="strict ssp:1 ssp:4 ssp:16 async", help="separated by spaces (%(default)s)")
    number("--replicas", type=int, default=4, help="%(default)s")
    number("--step-seconds", type=float, default=1.0, help="time of an undisturbed step (%(default)s)")
    number("--speeds", type=float, nargs="+", default=(), metavar="FACTOR", help="how many times longer each replica's")
    number("--jitter", type=float, default=0.0, help="spread of a step's time, 0.1: 10 %% (%(default)s)")
    number("--stall-share", type=float, default=0.0, help="share of steps that stall (%(default)s)")
    number("--stall-factor", type=float, default=12.0, help="how many times longer they take (%(default)s)")
    number("--latency", type=float, default=0.0, help="seconds one way (%(default)s)")
    number("--bandwidth", type=float, default=1e9, help="bits per second of a network interface (%(default)g)")
    number("--model-bytes", type=float, default=0.0, help="bytes of the model on the wire (%(default)s)")
    number("--failure-every", type=float, help="mean seconds between a replica's failures (none)")
    number("--down-seconds", type=float, default=0.0, help="how long a failed replica is away (%(default)s)")
    number(
        "--sync-every", type=int, default=16, help="steps between exchanges of dylu, diloco, decoupled (%(default)s)"
    )
    number("--seconds", type=float, default=2000.0, help="virtual time of every run (%(default)s)")
    number("--seed", type=int, default=0, help="%(default)s")
    number("--learn", choices=sorted(_PROBLEMS), help="also train a small problem, and show its loss (no)")
    number("--lr", type=float, default=0.05, help="the replicas' learning rate there (%(default)s)")


def mode_of(text: str, replicas: int, sync_every: int) -> Mode:
    """The mode that a word of ``--modes`` names.

    Raises:
        ValueError: if it names none.
    """
    name, *numbers = text.split(":")
    try:
        if name == "strict" and not numbers:
            return modes.strict()
        if name == "ssp" and len(numbers) == 1:
            return modes.ssp(int(numbers[0]))
        if name == "async" and len(numbers) <= 1:
            return modes.asynchronous(int(numbers[0]) if numbers else 1)
        if name == "dylu" and len(numbers) <= 1:
            return modes.dylu(int(numbers[0]) if numbers else sync_every)
        if name == "diloco" and len(numbers) <= 1:
            return modes.diloco(replicas, int(numbers[0]) if numbers else sync_every)
        if name == "decoupled" and 1 <= len(numbers) <= 2:
            grace = float(numbers[1]) if len(numbers) == 2 else 0.5
            return modes.decoupled(int(numbers[0]), grace, sync_every)
    except ValueError as error:
        raise ValueError(f"mode {text!r}: {error}") from None
    raise ValueError(f"mode {text!r}: expected strict, ssp:S, async[:H], dylu[:H], diloco[:H] or decoupled:Q[:G].")


def table(outcomes: Sequence[tuple[str, Outcome]], learned: bool) -> Table:
    """One row per mode; the first one's steps are 1."""
    made = Table(
        title="The same stalls and failures in every row",
        caption="steps of all replicas, and relative to the first row; shares of time that went into undisturbed steps "
        "and into waiting; largest lead in exchanges; mean and largest staleness in versions",
    )
    made.add_column("mode", no_wrap=True)
    for name in ("steps", "ratio", "good", "wait", "lead", "stale", "max", *(["loss"] * learned)):
        made.add_column(name, justify="right", no_wrap=True)
    first = sum(outcomes[0][1].steps)
    for name, o in outcomes:
        steps = sum(o.steps)
        waited = sum(o.waited) / (len(o.waited) * o.seconds)
        row = [name, str(steps), f"{steps / first:.2f}" if first else "-", f"{o.goodput:.0%}", f"{waited:.0%}"]
        row += [str(o.largest_lead), f"{o.staleness:.1f}", str(o.largest_staleness)]
        made.add_row(*row, *([f"{o.loss:.4g}"] * learned))
    return made


def simulate(options: argparse.Namespace, console: Console | None = None) -> list[tuple[str, Outcome]]:
    """Run the command.

    Args:
        options: What `add_arguments` declared.
        console: Where the table goes; None: standard output.

    Raises:
        ValueError: if an option does not fit.
    """
    cluster = Cluster(
        replicas=options.replicas,
        step_seconds=options.step_seconds,
        speeds=tuple(options.speeds),
        jitter=options.jitter,
        stall_share=options.stall_share,
        stall_factor=options.stall_factor,
        latency=options.latency,
        bandwidth=options.bandwidth / 8,
        model_bytes=options.model_bytes,
        failure_every=options.failure_every,
        down_seconds=options.down_seconds,
    )
    chosen = {text: mode_of(text, options.replicas, options.sync_every) for text in options.modes.split()}
    if not chosen:
        raise ValueError("--modes is empty: name at least one.")
    problem: Problem | None = _PROBLEMS[options.learn]() if options.learn else None
    outcomes = [
        (text, World(cluster, m, seed=options.seed, problem=problem, lr=options.lr).run(seconds=options.seconds))
        for text, m in chosen.items()
    ]
    (console or Console()).print(table(outcomes, problem is not None))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m lightning_sync.asynchronous.simulate``; None takes the process's own arguments."""
    parser = argparse.ArgumentParser(prog="lightning-sync simulate", description=__doc__)
    add_arguments(parser)
    try:
        simulate(parser.parse_args(arguments))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
