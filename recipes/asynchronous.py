"""What the simulated world shows about asynchronous training, over seeds: tables to compare with the issue's targets.

    python recipes/asynchronous.py stalls       # total steps of a bound against strict, 12x stalls in 5 % of the steps
    python recipes/asynchronous.py decoupled    # decoupled DiLoCo among stalls and failures: goodput and loss
    python recipes/asynchronous.py momentum     # outer momentum at every arrival, delayed, and synchronous
    python recipes/asynchronous.py divergence   # learning rates at which plain asynchrony diverges, and who does not

Each takes a few minutes on one core; no GPU, no network, no data.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from lightning_sync.asynchronous import modes
from lightning_sync.asynchronous.cluster import Cluster
from lightning_sync.asynchronous.modes import Mode
from lightning_sync.asynchronous.problems import Logistic, Problem, Quadratic
from lightning_sync.asynchronous.rules import Add, DelayCompensated, DelayedNesterov, InverseStaleness
from lightning_sync.asynchronous.world import World


def table(title: str, columns: Sequence[str]) -> Table:
    made = Table(title=title)
    made.add_column(columns[0])
    for column in columns[1:]:
        made.add_column(column, justify="right")
    return made


def stalls(seeds: int) -> Table:
    cluster = Cluster(replicas=4, stall_share=0.05, stall_factor=12.0)
    made = table("Total steps against strict, 4 replicas", ["seed", "s = 1", "s = 4", "s = 16", "none"])
    made.add_row("target", "1.10", "1.35", "1.70", "1.90")
    chosen = [modes.strict(), modes.ssp(1), modes.ssp(4), modes.ssp(16), modes.asynchronous()]
    for seed in range(seeds):
        strict, *others = (sum(World(cluster, m, seed=seed).run(seconds=6000).steps) for m in chosen)
        made.add_row(str(seed), *(f"{steps / strict:.2f}" for steps in others))
    return made


def decoupled(seeds: int) -> Table:
    replicas, every, rounds = 64, 16, 20
    cluster = Cluster(
        replicas=replicas,
        jitter=0.05,
        stall_share=0.005,
        stall_factor=10.0,
        failure_every=1500.0,
        down_seconds=30.0,
        latency=0.05,
    )
    problem, steps = Logistic(), replicas * every * rounds
    made = table(
        f"{replicas} replicas, 10x stalls in 0.5 % of the steps, a failure of 30 s every 1500 s each; {steps} steps",
        ["seed and mode", "goodput", "loss", "against failure-free diloco", "outer steps"],
    )
    for seed in range(seeds):
        strict = World(cluster, modes.strict(), seed=seed).run(seconds=400)
        made.add_row(f"{seed} strict", f"{strict.goodput:.0%}", "", "", "")
        quiet = World(Cluster(replicas), modes.diloco(replicas, every), seed=seed, problem=problem, lr=0.3)
        reference = quiet.run(steps=steps)
        made.add_row(f"{seed} diloco, nothing fails", "100%", f"{reference.loss:.4f}", "", str(reference.versions))
        for quorum in (1, 16, 32, 48):
            mode = modes.decoupled(quorum, 0.5, every)
            outcome = World(cluster, mode, seed=seed, problem=problem, lr=0.3).run(steps=steps)
            worse = f"{outcome.loss / reference.loss - 1:+.1%}"
            made.add_row(
                f"{seed} {mode.name}", f"{outcome.goodput:.0%}", f"{outcome.loss:.4f}", worse, str(outcome.versions)
            )
    return made


def momentum(seeds: int) -> Table:
    replicas, every = 8, 8
    cluster = Cluster(replicas=replicas, jitter=0.3)
    chosen = {
        "diloco": modes.diloco(replicas, every),
        "at every arrival": Mode("naive", every, Add(), modes.outer()),
        "delayed": Mode("delayed", every, DelayedNesterov(period=replicas)),
    }
    made = table(f"Mean loss of {seeds} seeds, quadratic, {replicas} replicas", ["learning rate, rounds", *chosen])
    for rounds in (20, 50):
        for lr in (0.01, 0.02, 0.03, 0.05):
            row = []
            for mode in chosen.values():
                worlds = (World(cluster, mode, seed=s, problem=Quadratic(noise=0.05), lr=lr) for s in range(seeds))
                row.append(sum(w.run(steps=replicas * every * rounds).loss for w in worlds) / seeds)
            made.add_row(f"{lr}, {rounds}", *(f"{loss:.4f}" for loss in row))
    return made


def divergence(seeds: int) -> Table:
    replicas = 16
    cluster = Cluster(replicas=replicas, jitter=0.2)

    def chosen(lr: float) -> dict[str, Mode]:
        def sgd(values: torch.Tensor) -> torch.optim.Optimizer:
            return torch.optim.SGD([values], lr=lr)

        return {
            "strict": modes.strict(),
            "add, w = 1": Mode("add", weight=1.0),
            "add, w = 1/N": Mode("add"),
            "add, w = 1, s = 1": Mode("ssp", weight=1.0, max_staleness=1),
            "inverse staleness": Mode("inverse", rule=InverseStaleness(), weight=1.0),
            "gradients": Mode("downpour", optimizer=sgd, push="gradient"),
            "compensated": Mode("dc", rule=DelayCompensated(), optimizer=sgd, push="gradient"),
            "comp., lambda 1": Mode("dc", rule=DelayCompensated(1.0, False), optimizer=sgd, push="gradient"),
        }

    problems: list[tuple[str, Problem, tuple[float, ...]]] = [
        ("quadratic", Quadratic(least=0.05, noise=0.0), (0.1, 0.2, 0.5)),
        ("logistic", Logistic(), (1.0, 3.0, 10.0)),
    ]
    made = table(f"Loss after 60 rounds of {replicas} replicas, seed 0", ["problem, learning rate", *chosen(0.0)])
    for name, problem, rates in problems:
        for lr in rates:
            row = [World(cluster, m, problem=problem, lr=lr).run(steps=replicas * 60).loss for m in chosen(lr).values()]
            made.add_row(f"{name}, {lr}", *(f"{loss:.3g}" for loss in row))
    return made


STUDIES: dict[str, Callable[[int], Table]] = {
    "stalls": stalls,
    "decoupled": decoupled,
    "momentum": momentum,
    "divergence": divergence,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    Console(width=140).print(STUDIES[arguments.study](arguments.seeds))
