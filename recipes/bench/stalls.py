"""Steps that ranks make in a given time when they stall now and then, or one of them is slower for good.

    python recipes/bench/stalls.py                      # 4 ranks, each stalls 12x in 5 % of its steps
    python recipes/bench/stalls.py --slow 4 --stall 1   # one rank 4x slower for good

Compute is a pause, so that any number of ranks fits on two cores; exchanges are real, over TCP, encrypted. Ranks are
threads of one process. Prints total steps of all ranks, and against ranks in step (s = 0, blocking).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import threading
import time

import torch

from lightning_sync.asynchronous.codec import CastCodec
from lightning_sync.asynchronous.engine import Engine, Terms
from lightning_sync.asynchronous.rules import Add
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.mail import new_secret
from lightning_sync.comm.topology import Topology
from lightning_sync.state import ParamSpec


def measure(args: argparse.Namespace, bound: int | None, blocking: bool) -> list[int]:
    """Steps of each rank."""
    terms = Terms(1, bound, blocking, "delta", 1 / args.ranks, Add())
    spec = [ParamSpec("weight", (args.size,), torch.float32, torch.device("cpu"))]
    secret, failed = new_secret(), []
    params = [torch.zeros(args.size) for _ in range(args.ranks)]
    over = threading.Event()

    def check() -> None:
        if over.is_set():
            raise TimeoutError  # time is up: whoever still waits for others stops

    engines = [
        Engine(
            spec, [p], terms, CastCodec(), topology=Topology(rank, (0,) * args.ranks), counters=Counters(),
            secret=secret, number=1, address="127.0.0.1", on_error=lambda e, where: failed.append(e), check=check,
            waiting=contextlib.nullcontext,
        )
        for rank, p in enumerate(params)
    ]  # fmt: skip
    for engine in engines:
        engine.connect([e.card for e in engines])

    def work(rank: int) -> None:
        dice = random.Random(args.seed * 100 + rank)
        pause = args.step * (args.slow if rank == 0 else 1.0)
        with contextlib.suppress(TimeoutError):
            while not over.is_set():
                time.sleep(pause * (args.stall if dice.random() < args.share else 1.0))
                params[rank].sub_(1e-3)
                engines[rank].after_step()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(args.ranks)]
    for thread in threads:
        thread.start()
    time.sleep(args.seconds)
    steps = [engine.steps for engine in engines]
    over.set()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.close()
    if failed:
        raise failed[0]
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", type=int, default=10_000, help="parameters")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--stall", type=float, default=12.0, help="how many times longer a step that stalls takes")
    parser.add_argument("--share", type=float, default=0.05, help="share of the steps that stall")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times slower rank 0 is for good")
    parser.add_argument("--seconds", type=float, default=15.0, help="per mode")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}")
    strict = 0
    for name, bound, blocking in (
        ("in step", 0, True), ("s = 1", 1, True), ("s = 4", 4, True), ("s = 16", 16, True), ("none", None, False)
    ):  # fmt: skip
        steps = measure(args, bound, blocking)
        strict = strict or sum(steps)
        print(f"{name:8s} {sum(steps):6d} steps, {sum(steps) / strict:.2f} times in step; by rank {steps}", flush=True)
    print(f"load after: {os.getloadavg()[0]:.1f}; threads of one process, loopback")


if __name__ == "__main__":
    main()
