"""All that one rank runs for asynchronous training: its shard's owner, its client, and the rules of when to wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sync.asynchronous.client import Client, Errand
from lightning_sync.asynchronous.codec import Codec
from lightning_sync.asynchronous.layout import FlatLayout
from lightning_sync.asynchronous.optimizer import ViewFactory, like
from lightning_sync.asynchronous.owner import Owner
from lightning_sync.asynchronous.replica import Replica
from lightning_sync.asynchronous.rules import Rule
from lightning_sync.asynchronous.shard import Shard
from lightning_sync.asynchronous.spread import Spread
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.mail import Box, Run, fingerprint
from lightning_sync.comm.topology import Topology
from lightning_sync.state import ParamSpec


@dataclass(frozen=True)
class Terms:
    """When a replica exchanges, and what it waits for.

    Attributes:
        every: Steps between two exchanges, at first.
        bound: The staleness bound s; `None`: nobody waits for anybody.
        blocking: Whether a step waits for the exchange before it, instead of going on meanwhile.
        push: ``"delta"`` or ``"gradient"``.
        weight: What contributions are multiplied by.
        rule: What they do to a shard.
    """

    every: int
    bound: int | None
    blocking: bool
    push: str
    weight: float
    rule: Rule

    @property
    def ordered(self) -> bool:
        """Whether replicas go in step, so that owners can apply contributions in the order of ranks."""
        return self.bound == 0 and self.blocking


class Engine:
    """One rank's part in asynchronous training; every method belongs to the training thread.

    Args:
        specs: The trained parameters, in registration order, and
        params: the parameters themselves, which all ranks hold alike.
        terms: When to exchange.
        codec: What is on the wire.
        topology: All ranks.
        counters: Where bytes are counted.
        secret: The run's secret key.
        number: The run, 64 bits.
        address: Where this rank listens.
        outer: Makes an optimiser that applies the rule's changes to the shard; `None`: they are subtracted.
        inner: With ``push="gradient"``, the module's own optimiser, which owners apply in its place.
        on_error: Called from a background thread with what has ended it.
        check: Called several times a second while waiting; raises what has ended the run elsewhere.
        waiting: Entered around every wait.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        params: Sequence[Tensor],
        terms: Terms,
        codec: Codec,
        *,
        topology: Topology,
        counters: Counters,
        secret: bytes,
        number: int,
        address: str,
        outer: ViewFactory | None = None,
        inner: Optimizer | None = None,
        on_error: Callable[[BaseException, str], None],
        check: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.terms = terms
        self.layout = FlatLayout(specs, topology.size, codec.alignment)
        self.every = terms.every
        """Steps until the next exchange is due; may be changed between steps."""
        self.skipped = 0
        """Exchanges that were due while another was under way, and became part of the next."""
        self.steps = 0
        self.before = 0
        """Steps of the run that were made before this began, such as those of a warm-up."""
        self.leads, self.staleness = Spread(), Spread()
        self.pause: Callable[[], float] = lambda: 0.0
        """Seconds by which the next exchange is held up; for experiments."""
        self._params = list(params)
        self._codec = codec
        self._topology = topology
        self._counters = counters
        self._on_error = on_error
        self._check = check
        self._waiting = waiting
        self._samples = 0.0
        self._meetings = 0
        self._met_at = -1
        self._client: Client | None = None
        self._replica: Replica | None = None
        a, b = self.layout.slices[topology.rank]
        values = self.layout.gather(params, self.layout.zeros())[a:b].clone()
        largest = max(4 * (d - c) for c, d in self.layout.slices) + 8 * topology.size
        self._run = Run(secret, number, fingerprint(specs), topology.size, largest)
        self._stretches: list[tuple[int, int, int]] = []
        if inner is not None:
            self._stretches = self.layout.stretches((a, b), _group_of(inner, params))
            outer = like(inner, self._stretches)
        shard = Shard(values, terms.rule, replicas=topology.size, push=terms.push, optimizer=outer)
        self._box = Box(self._run, address)
        self.owner = Owner(
            self._box,
            shard,
            codec,
            weight=terms.weight,
            ordered=terms.ordered,
            topology=topology,
            counters=counters,
            on_error=on_error,
        )
        self.card = f"{self._run.model:016x} {self._box.endpoint}"
        """What the other ranks must know of this one: its model and where it listens."""

    def connect(self, cards: Sequence[str]) -> None:
        """Start the threads; `cards` are those of all ranks, by rank.

        Raises:
            ValueError: if a rank has another model.
        """
        models, endpoints = zip(*(card.split(" ", 1) for card in cards), strict=True)
        others = [rank for rank, model in enumerate(models) if model != models[0]]
        if others:
            raise ValueError(
                f"Ranks {others} have other trained parameters than rank 0, by name, shape, dtype or order. All ranks "
                "must build the same model."
            )
        self._client = Client(
            self._run,
            self._box,
            endpoints,
            layout=self.layout,
            codec=self._codec,
            fetched=self.layout.zeros(),
            topology=self._topology,
            counters=self._counters,
            on_error=self._on_error,
        )
        self._replica = Replica(self._params, self.layout, self._client, self.terms.rule)
        self.owner.start()

    @property
    def replica(self) -> Replica:
        """This rank's replica, once it is connected."""
        assert self._replica is not None
        return self._replica

    @property
    def exchanges(self) -> int:
        """Exchanges that have taken effect."""
        return self.replica.clock

    @property
    def met(self) -> bool:
        """Whether no step was made since the last meeting."""
        return self._met_at == self.steps

    # ---- training ----------------------------------------------------------------------------------------------------

    def after_step(self, samples: float = 1.0, gradient: Sequence[Tensor] | None = None) -> None:
        """A step is over: take over what has arrived, and exchange if it is time.

        Args:
            samples: What the step's data counts for.
            gradient: With ``push="gradient"``, what to send.
        """
        replica, terms = self.replica, self.terms
        self.owner.check()
        self.steps += 1
        self._samples += samples
        replica.steps += 1
        if replica.errand is not None and replica.errand.done.is_set():
            self._take_over()
        if replica.steps < self.every:
            return
        if replica.errand is not None:
            if terms.bound is None and gradient is None:
                self.skipped += 1  # its progress is part of the next exchange
                return
            self._wait()
        self._begin(gradient)
        if terms.blocking:
            self._wait()

    def meet(self) -> None:
        """Send what is left, then wait for all replicas; all go on from the same bits (every rank calls this).

        Again after the same step is no second meeting. `consensus` holds the result.
        """
        replica = self.replica
        if self.met:
            return
        if replica.errand is not None:
            self._wait()
        if replica.steps and self.terms.push == "delta" and not self.terms.rule.reads_first:
            self._begin(None, bounded=False)
            self._wait()
        self._meetings += 1
        replica.meet(self._meetings, self.before + self.steps)
        self._wait()
        self._met_at = self.steps

    def set_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over learning rates and other options from the module's own optimiser (with ``push="gradient"``)."""
        optimizer = self.owner.shard.optimizer
        assert optimizer is not None
        with self.owner.lock:
            for group, (_, _, index) in zip(optimizer.param_groups, self._stretches, strict=True):
                group.update({k: v for k, v in groups[index].items() if k not in ("params", "param_names")})

    def consensus(self) -> dict[str, Tensor]:
        """What the owners held at the last meeting, by parameter; float32 on the host."""
        views = self.layout.views(self.replica.fetched)
        return {p.name: view for p, view in zip(self.layout.params, views, strict=True)}

    def _begin(self, gradient: Sequence[Tensor] | None, *, bounded: bool = True) -> None:
        bound = self.terms.bound if bounded else None
        need = 0 if bound is None else max(0, self.replica.clock + 1 - bound)
        samples, self._samples = self._samples, 0.0
        self.replica.begin(
            need=need, samples=samples, step=self.before + self.steps, gradient=gradient, delay=self.pause()
        )

    def _wait(self) -> None:
        errand = self.replica.errand
        assert errand is not None
        if not errand.done.is_set():
            with self._waiting():
                while not errand.done.wait(0.1):
                    self._look()
        self._take_over()

    def _take_over(self) -> None:
        errand = self.replica.errand
        assert errand is not None
        self._look()
        self.replica.take_over()
        if errand.meeting is None:
            self._note(errand)

    def _look(self) -> None:
        """Raise what has ended the run, here or elsewhere."""
        assert self._client is not None
        self._check()
        self._client.check()
        self.owner.check()

    def _note(self, errand: Errand) -> None:
        self._counters.exchanges = self.replica.clock
        self.leads.add(max(0, self.replica.clock - min(errand.leads)))
        for staleness in errand.staleness:
            self.staleness.add(staleness)

    # ---- report, state, end ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        """What this rank has seen, as numbers."""
        return {
            **{f"staleness_{name}": value for name, value in self.staleness.summary().items()},
            **{f"clock_lead_{name}": value for name, value in self.leads.summary().items()},
            "achieved_period": self.steps / max(1, self.exchanges),
            "coalesced": float(self.skipped),
            "rejected": float(sum(self.owner.rejected.values())),
        }

    def numbers(self) -> dict[str, Any]:
        """All numbers to restore, after a meeting."""
        with self.owner.lock:
            shard = self.owner.shard.state()
        kept = {k: v for k, v in shard.items() if k not in ("values", "rule", "reads", "optimizer")}
        return {
            "clock": self.replica.clock,
            "sent": self.replica.sent,
            "meetings": self._meetings,
            "steps": self.steps,
            "before": self.before,
            "shard": json.dumps(kept),
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors to restore, after a meeting: this rank's shard and what its client has not sent."""
        assert self._client is not None
        with self.owner.lock:
            shard = self.owner.shard.state()
        optimizer = shard["optimizer"] or {"state": {}}
        moments = {f"{i}/{k}": v for i, kept in optimizer["state"].items() for k, v in kept.items()}
        found: dict[str, dict[str, Tensor]] = {"shard": {"values": shard["values"]}, "rule": dict(shard["rule"])}
        if self._client.residual is not None:
            found["residual"] = {"values": self._client.residual}
        return found | ({"moments": moments} if moments else {})

    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what `numbers` and `tensors` returned on this rank, then meet (all ranks)."""
        kept = json.loads(numbers["shard"])
        for name in ("contains", "sequences", "accepted"):
            kept[name] = {int(k): v for k, v in kept[name].items()}
        for name in ("next", "stale"):
            kept["ledger"][name] = {int(k): v for k, v in kept["ledger"][name].items()}
        shard = self.owner.shard
        with self.owner.lock:
            optimizer = shard.state()["optimizer"]
            if optimizer is not None:
                optimizer = {**optimizer, "state": {}}
                for name, tensor in tensors.get("moments", {}).items():
                    index, key = name.split("/", 1)
                    optimizer["state"].setdefault(int(index), {})[key] = tensor
            shard.load_state(
                {**kept, "values": tensors["shard"]["values"], "rule": tensors["rule"], "reads": {},
                 "optimizer": optimizer}
            )  # fmt: skip
            if shard.rule.needs_backup:
                for reader in range(self._topology.size):
                    shard.read(reader)
        assert self._client is not None
        if self._client.residual is not None and "residual" in tensors:
            self._client.residual.copy_(tensors["residual"]["values"])
        self._meetings = 0
        self.steps, self.before = int(numbers["steps"]), int(numbers.get("before", 0))
        self.replica.resume(int(numbers["clock"]), int(numbers["sent"]))
        self.meet()

    def restart(self, before: int = 0) -> None:
        """Begin again from what the parameters hold, which is the same on all ranks (all ranks).

        Args:
            before: Steps of the run until now.
        """
        a, b = self.layout.slices[self._topology.rank]
        with self.owner.lock:
            self.owner.shard.values.copy_(self.layout.gather(self._params, self.layout.zeros())[a:b])
        self.replica.resume(0, 0)
        self.steps, self.before, self._samples, self._met_at = 0, before, 0.0, -1
        self.meet()

    def close(self) -> None:
        """End the threads and give ports and descriptors back (no communication)."""
        if self._client is not None:
            self._client.close()
        self.owner.close()


def pick_weight(weight: float | None, world_size: int, push: str = "delta") -> float:
    """The weight of contributions.

    By default 1 / number of replicas for deltas, so that equal replicas move the values by one replica's progress, and
    1 for gradients, each of which is one step of the optimiser.
    """
    if weight is not None:
        return float(weight)
    return 1 / world_size if push == "delta" else 1.0


def _group_of(optimizer: Optimizer, params: Sequence[Tensor]) -> list[int]:
    """For every parameter, the index of its group.

    Raises:
        ValueError: for a parameter that the optimiser does not have.
    """
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [tuple(p.shape) for p in params if id(p) not in groups]
    if missing:
        raise ValueError(
            f"push='gradient': {type(optimizer).__name__} does not have all trained parameters (those of shapes "
            f"{missing} are missing). Give them to it, or set requires_grad=False."
        )
    return [groups[id(p)] for p in params]


def as_secret(tensor: Tensor) -> bytes:
    """The key in a tensor of bytes."""
    return bytes(tensor.to(torch.uint8).tolist())
