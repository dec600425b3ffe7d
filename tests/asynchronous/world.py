"""Several ranks of asynchronous training as threads of one process, over real sockets, without Lightning."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sync.asynchronous.codec import Codec, codec_for
from lightning_sync.asynchronous.engine import Engine, Terms
from lightning_sync.asynchronous.rules import Add
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.mail import new_secret
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import Exact
from lightning_sync.state import ParamSpec

SHAPES = {"first.weight": (7, 5), "first.bias": (7,), "last.weight": (3, 7)}


class Rank:
    """One rank: its parameters and its engine."""

    def __init__(self, rank: int, size: int, secret: bytes, codec: Codec, terms: Terms) -> None:
        self.rank, self.size = rank, size
        self.params = [torch.zeros(shape) for shape in SHAPES.values()]
        specs = [ParamSpec(name, shape, torch.float32, torch.device("cpu")) for name, shape in SHAPES.items()]
        self.counters = Counters()
        self.errors: list[BaseException] = []
        self.over: Callable[[], None] = lambda: None
        self.engine = Engine(
            specs,
            self.params,
            terms,
            codec,
            topology=Topology(rank, (0,) * size),
            counters=self.counters,
            secret=secret,
            number=12345,
            address="127.0.0.1",
            on_error=lambda error, where: self.errors.append(error),
            check=lambda: self.over(),
            waiting=contextlib.nullcontext,
        )

    @property
    def model(self) -> str:
        return self.engine.card.split(" ", 1)[0]

    @property
    def endpoint(self) -> str:
        return self.engine.card.split(" ", 1)[1]

    @property
    def flat(self) -> Tensor:
        return torch.cat([p.reshape(-1) for p in self.params]).clone()

    def step(self, change: list[Tensor]) -> None:
        """One step: subtract `change` from the parameters."""
        for p, c in zip(self.params, change, strict=True):
            p.sub_(c)
        self.engine.after_step()


def whole(generator: torch.Generator) -> list[Tensor]:
    """Changes of small whole numbers, whose sums are exact in any order."""
    return [torch.randint(-4, 5, shape, generator=generator).float() for shape in SHAPES.values()]


def flat(change: list[Tensor]) -> Tensor:
    return torch.cat([c.reshape(-1) for c in change])


def world(
    size: int, codec: Codec | None = None, through: Callable[[str], str] = lambda endpoint: endpoint, **terms: Any
) -> list[Rank]:
    """Ranks that are connected, `through` something that stands before their endpoints; close them."""
    options: dict[str, Any] = {
        "every": 1, "bound": None, "blocking": False, "push": "delta", "weight": 1.0, "rule": Add(),
    }  # fmt: skip
    agreed, secret = Terms(**{**options, **terms}), new_secret()
    ranks = [Rank(r, size, secret, codec or codec_for(Exact()), agreed) for r in range(size)]
    for rank in ranks:
        rank.engine.connect([f"{r.model} {through(r.endpoint)}" for r in ranks])
    return ranks


def run(ranks: list[Rank], body: Callable[[Rank], Any], seconds: float = 60.0) -> list[Any]:
    """Run `body` for every rank at the same time, close all, and return the results."""
    results: list[Any] = [None] * len(ranks)
    failed: list[BaseException] = []

    def stop() -> None:
        if failed:
            raise failed[0]

    def one(index: int) -> None:
        try:
            results[index] = body(ranks[index])
        except BaseException as error:
            failed.append(error)

    for rank in ranks:
        rank.over = stop
    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(ranks))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
        assert not any(thread.is_alive() for thread in threads), "ranks did not end in time"
    finally:
        for rank in ranks:
            rank.engine.close()
    if failed:
        raise failed[0]
    return results
