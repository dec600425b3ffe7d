"""The modes that the simulated world can run, as combinations of rule, period and bound."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from lightning_sync.asynchronous.clocks import check_bound
from lightning_sync.asynchronous.optimizer import ViewFactory
from lightning_sync.asynchronous.rules import Add, Quorum, Rule
from lightning_sync.checks import check_choice, check_flags, check_integer
from lightning_sync.periodic.outer import Nesterov


@dataclass(frozen=True)
class Mode:
    """How replicas exchange.

    Args:
        name: For tables.
        sync_every: Steps between two exchanges.
        rule: What the owners do with contributions.
        optimizer: Applies the rule's changes; None subtracts them.
        push: ``"delta"`` or ``"gradient"`` (with `sync_every` 1).
        weight: Of every contribution; None is 1 / number of replicas for deltas, 1 for gradients.
        max_staleness: The bound s; None: none.
        blocking: Whether a replica waits, after an exchange, for values that contain its own contribution.
        local_updates: ``"fixed"``, or ``"dynamic"``: `sync_every` is the fastest replica's period, and others' are
            shorter in proportion to their speed.
        failed: ``"wait"``: everybody waits until a failed replica is back, with nothing lost but the step it was in,
            ``"leave"``: it leaves the clock, loses what it has not sent, and takes the current values when it returns.
    """

    name: str
    sync_every: int = 1
    rule: Rule = field(default_factory=Add)
    optimizer: ViewFactory | None = None
    push: str = "delta"
    weight: float | None = None
    max_staleness: int | None = None
    blocking: bool = True
    local_updates: str = "fixed"
    failed: str = "leave"

    def __post_init__(self) -> None:
        check_integer("Mode", 1, sync_every=self.sync_every)
        check_bound("Mode", self.max_staleness)
        check_flags("Mode", blocking=self.blocking)
        check_choice("Mode", ("delta", "gradient"), push=self.push)
        check_choice("Mode", ("fixed", "dynamic"), local_updates=self.local_updates)
        check_choice("Mode", ("wait", "leave"), failed=self.failed)
        if self.push == "gradient" and self.sync_every != 1:
            raise ValueError(f"Mode(sync_every={self.sync_every}, push='gradient'): gradients are sent every step.")
        if self.local_updates == "dynamic" and self.sync_every == 1:
            raise ValueError("Mode(local_updates='dynamic', sync_every=1): periods are cut down, and 1 is the least.")
        if self.rule.reads_first:
            raise ValueError(f"Mode(rule={self.rule!r}): the simulated world reads after an exchange, not before.")
        if self.max_staleness is not None and self.rule.holds_back:
            raise ValueError(
                f"Mode(max_staleness={self.max_staleness}, rule={self.rule!r}): it holds contributions back until "
                "others have come, so replicas would wait for each other for ever. Use max_staleness=None."
            )
        if self.weight is not None and not self.rule.uses_weight:
            raise ValueError(f"Mode(weight={self.weight!r}): {self.rule!r} does not use a weight; leave it out.")

    def weight_of(self, replicas: int) -> float:
        """The weight of a contribution among this many replicas."""
        if self.weight is not None:
            return self.weight
        return 1 / replicas if self.push == "delta" else 1.0


def outer(lr: float = 0.7, momentum: float = 0.9) -> ViewFactory:
    """Nesterov's optimiser on a shard, with DiLoCo's constants."""

    def make(values: Tensor) -> Optimizer:
        return Nesterov(lr, momentum)([values])

    return make


def strict() -> Mode:
    """Everybody waits for everybody in every step."""
    return Mode("strict", max_staleness=0, failed="wait")


def ssp(max_staleness: int, sync_every: int = 1) -> Mode:
    """Stale-synchronous: a replica waits only for those that are more than the bound behind."""
    return Mode(f"ssp, s = {max_staleness}", sync_every=sync_every, max_staleness=max_staleness)


def asynchronous(sync_every: int = 1, rule: Rule | None = None) -> Mode:
    """Nobody waits for anybody."""
    return Mode("async", sync_every=sync_every, rule=rule or Add())


def dylu(sync_every: int = 16, rule: Rule | None = None) -> Mode:
    """Nobody waits for anybody, and slower replicas make fewer steps between exchanges (Liu et al. 2024)."""
    name = f"async, {sync_every} steps by speed"
    return Mode(name, sync_every=sync_every, rule=rule or Add(), local_updates="dynamic")


def diloco(replicas: int, sync_every: int = 64, lr: float = 0.7, momentum: float = 0.9) -> Mode:
    """Synchronous DiLoCo: everybody waits for everybody at every exchange."""
    rule = Quorum(quorum=replicas, grace=0.0)
    optimizer = outer(lr, momentum)
    return Mode("diloco", sync_every, rule, optimizer, failed="wait")


def decoupled(quorum: int, grace: float = 0.5, sync_every: int = 64, lr: float = 0.7, momentum: float = 0.9) -> Mode:
    """Decoupled DiLoCo: outer steps by quorum, for which nobody waits."""
    rule, optimizer = Quorum(quorum, grace), outer(lr, momentum)
    return Mode(f"decoupled, quorum {quorum}", sync_every, rule, optimizer, blocking=False)
