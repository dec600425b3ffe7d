"""One owner's part of the parameters, with its version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sync.asynchronous.ledger import Ledger
from lightning_sync.asynchronous.optimizer import ShardOptimizer, ViewFactory
from lightning_sync.asynchronous.rules.base import Contribution, Facts, Rule
from lightning_sync.checks import check_choice, check_integer


@dataclass(frozen=True)
class Receipt:
    """What became of a contribution.

    Attributes:
        taken: Whether it was new. If not it was a repetition, and changed nothing.
        version: The shard's version afterwards.
        staleness: The version it landed on, minus the version it was computed from; 0 if not taken.
    """

    taken: bool
    version: int
    staleness: int


@dataclass(frozen=True)
class Read:
    """A shard at one moment.

    Attributes:
        version: Its version.
        values: A copy of its values, `[n]`, which nobody may write to; None if the reader has this version already.
        contains: What is in these values: per replica, one more than the clock of its last update (absent: nothing).
        sequences: The same in sequence numbers: what a replica has sent from this number on is not in the values yet.
        difference: `values` minus what the reader has, `[n]`, if that was asked for and is known.
    """

    version: int
    values: Tensor | None
    contains: dict[int, int]
    sequences: dict[int, int]
    difference: Tensor | None = None


class Shard:
    """Values, their version, and a rule that answers contributions.

    Every applied change makes a new version. Not locked: `begin`, `apply`, `tick`, `flush`, `due`, `read`, `retire`,
    `rejoin`, `state` and `load_state` must each run alone (one lock around each call), since a read must not see half a
    change, and values, version and `contains` belong together. Two threads that add to one tensor without a lock lose
    updates. What `read` returns may be sent without the lock.

    Args:
        values: The shard, a floating-point `[n]` (float32), which the shard owns and changes in place from now on.
        rule: What contributions do.
        replicas: How many replicas there are, numbered from 0.
        push: ``"delta"`` or ``"gradient"``: what contributions are. Gradients need an optimiser.
        optimizer: Makes the optimiser that applies the rule's changes, see `ShardOptimizer`; None subtracts them.
        keep_reads: Whether to remember what each replica has read, for `read(difference=True)`: 4 bytes per element and
            replica. Rules with `needs_backup` always do.

    Raises:
        ValueError: if values, rule, push and optimiser do not fit together.
    """

    def __init__(
        self,
        values: Tensor,
        rule: Rule,
        *,
        replicas: int,
        push: str = "delta",
        optimizer: ViewFactory | None = None,
        keep_reads: bool = False,
    ) -> None:
        if values.ndim != 1 or not values.is_floating_point() or values.requires_grad:
            raise ValueError(
                f"Shard(values of shape {tuple(values.shape)}, {values.dtype}, requires_grad={values.requires_grad}): "
                "expected a detached floating-point tensor of one dimension."
            )
        check_integer("Shard", 1, replicas=replicas)
        check_choice("Shard", ("delta", "gradient"), push=push)
        if push not in rule.pushes:
            raise ValueError(f"{rule!r} is defined for {' and '.join(rule.pushes)}, not for push={push!r}.")
        if push == "gradient" and optimizer is None:
            raise ValueError("Shard(push='gradient', optimizer=None): a gradient needs an optimiser that applies it.")
        self.values = values
        self.rule = rule = rule.for_replicas(replicas)
        self.version = 0
        self.seconds = 0.0
        """Training time so far, at the latest call: the owner's clock may start anywhere, and anew when it resumes."""
        self._origin: float | None = None
        self.ledger = Ledger()
        self.contains: dict[int, int] = {}
        """Per replica, one more than the clock of its last update in `values`; absent means nothing of it."""
        self.sequences: dict[int, int] = {}
        """The same in sequence numbers."""
        self._accepted: dict[int, tuple[int, int]] = {}  # like both, but with what the rule still holds back
        self._living = set(range(replicas))
        self._replicas = replicas
        self._optimizer = None if optimizer is None else ShardOptimizer(values, optimizer)
        self._keeps = keep_reads or rule.needs_backup
        self._reads: dict[int, dict[int, Tensor]] = {}
        self._rule_state = rule.init(values)

    @property
    def optimizer(self) -> ShardOptimizer | None:
        """What applies the rule's changes, if not a subtraction; its learning rates may be set between calls."""
        return self._optimizer

    def begin(self, now: float) -> None:
        """Training begins now, or goes on after `load_state`, by the owner's clock.

        Without this call it begins with the first contribution, and rules that wait know no gap before the second.
        """
        self._origin = now - self.seconds

    def apply(self, contribution: Contribution, now: float = 0.0) -> Receipt:
        """Take one contribution, once.

        Args:
            contribution: What has arrived.
            now: Seconds by the owner's clock; only rules that wait look at it.

        Raises:
            ValueError: if it cannot belong to this shard. Nothing is changed, as with the next.
            SequenceGapError: if an earlier contribution of the sender is missing.
        """
        self._check(contribution)
        sender = contribution.sender
        if not self.ledger.admit(sender, contribution.sequence):
            return Receipt(False, self.version, 0)
        read_values = self._backup(contribution) if self.rule.needs_backup else None
        staleness = self.version - contribution.read_version
        self.ledger.take(sender, staleness)
        self._forget_before(sender, contribution.read_version)
        self._accepted[sender] = (contribution.clock + 1, contribution.sequence + 1)
        facts = Facts(staleness, read_values, self._elapsed(now), self._living)
        self._move(self.rule.change(self.values, contribution, facts, self._rule_state))
        return Receipt(True, self.version, staleness)

    def due(self) -> float | None:
        """When to call `tick` if nothing arrives before, in seconds of the owner's clock; None: no need."""
        due = self.rule.due(self._rule_state, self._living)
        return None if due is None else due + (self._origin or 0.0)

    def tick(self, now: float) -> int:
        """Let the rule do what time alone makes due: the version afterwards."""
        self._move(self.rule.release(self.values, self._elapsed(now), self._living, self._rule_state))
        return self.version

    def flush(self) -> int:
        """Make everything taken so far count, as at the end of a run or before a checkpoint: the version afterwards."""
        self._move(self.rule.flush(self.values, self._rule_state))
        return self.version

    def read(self, reader: int, since: int | None = None, difference: bool = False) -> Read:
        """The values now.

        Args:
            reader: The replica that reads; it must read before it contributes wherever the rule has `needs_backup`.
            since: The version the reader has: if nothing has changed, no values are copied.
            difference: Whether to give the difference from version `since` too.

        Raises:
            ValueError: if `difference` is asked for and the shard does not keep what was read.
        """
        self._check_replica(reader)
        contains, sequences = dict(self.contains), dict(self.sequences)
        if difference and not self._keeps:
            raise ValueError("Shard.read(difference=True): the shard keeps no reads; make it with keep_reads=True.")
        kept = self._reads.setdefault(reader, {})
        if since == self.version and (not self._keeps or since in kept):
            return Read(self.version, None, contains, sequences)
        values = self.values.clone()  # sent, or kept, while the shard goes on
        base = kept.get(since) if difference and since is not None else None
        if self._keeps:
            kept[self.version] = values
        return Read(self.version, values, contains, sequences, None if base is None else values - base)

    def retire(self, replica: int) -> None:
        """Nothing more is expected of this replica; what it has read is forgotten, what it has sent stays."""
        self._check_replica(replica)
        if replica in self._living:
            self._living.discard(replica)
            self.rule.forget(replica, self._rule_state)
        self._reads.pop(replica, None)

    def rejoin(self, replica: int) -> int:
        """The replica is back: the sequence number of its next contribution. It reads before it contributes."""
        self._check_replica(replica)
        self._living.add(replica)
        return self.ledger.expected(replica)

    def state(self) -> dict[str, Any]:
        """All there is to restore, as tensors (not copied) and numbers."""
        return {
            "values": self.values,
            "version": self.version,
            "seconds": self.seconds,
            "contains": dict(self.contains),
            "sequences": dict(self.sequences),
            "accepted": {s: list(a) for s, a in self._accepted.items()},
            "living": sorted(self._living),
            "ledger": self.ledger.state(),
            "rule": dict(self._rule_state),
            "reads": {r: dict(kept) for r, kept in self._reads.items()},
            "optimizer": None if self._optimizer is None else self._optimizer.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, with the same rule, optimiser and length.

        Raises:
            ValueError: if the state is of another length, or of a shard with and this one without an optimiser.
        """
        if state["values"].shape != self.values.shape or (state["optimizer"] is None) != (self._optimizer is None):
            raise ValueError(
                f"Shard.load_state: the state has {state['values'].numel()} values and "
                f"{'no' if state['optimizer'] is None else 'an'} optimiser, the shard {self.values.numel()} and "
                f"{'no' if self._optimizer is None else 'one'}."
            )
        self.values.copy_(state["values"])
        self.version, self.seconds = state["version"], state["seconds"]
        self.contains, self.sequences = dict(state["contains"]), dict(state["sequences"])
        self._accepted = {s: (a[0], a[1]) for s, a in state["accepted"].items()}
        self._living = set(state["living"])
        self.ledger.load_state(state["ledger"])
        self._rule_state = {name: tensor.clone() for name, tensor in state["rule"].items()}
        self._reads = {r: {v: t.clone() for v, t in kept.items()} for r, kept in state["reads"].items()}
        if self._optimizer is not None:
            self._optimizer.load_state(state["optimizer"])

    def _elapsed(self, now: float) -> float:
        if self._origin is None:
            self.begin(now)
        assert self._origin is not None
        self.seconds = max(now - self._origin, self.seconds)
        return self.seconds

    def _move(self, change: Tensor | None) -> None:
        if change is None:
            return
        with torch.no_grad():
            if self._optimizer is None:
                self.values.sub_(change)
            else:
                self._optimizer.step(change)
        self.version += 1
        for sender, (clock, sequence) in self._accepted.items():
            self.contains[sender], self.sequences[sender] = clock, sequence

    def _backup(self, contribution: Contribution) -> Tensor:
        kept = self._reads.get(contribution.sender, {})
        if contribution.read_version not in kept:
            raise ValueError(
                f"Replica {contribution.sender} computed on version {contribution.read_version}, which it has not read "
                f"or of which it has used a later one; kept are {sorted(kept)}. {type(self.rule).__name__} needs it."
            )
        return kept[contribution.read_version]

    def _forget_before(self, sender: int, version: int) -> None:
        kept = self._reads.get(sender, {})
        for old in [v for v in kept if v < version]:
            del kept[old]

    def _check(self, contribution: Contribution) -> None:
        self._check_replica(contribution.sender)
        values = contribution.values
        if values.shape != self.values.shape or values.dtype != self.values.dtype:
            raise ValueError(
                f"Replica {contribution.sender} sent {tuple(values.shape)} values of {values.dtype} to a shard of "
                f"{tuple(self.values.shape)} values of {self.values.dtype}."
            )
        if not 0 <= contribution.read_version <= self.version:
            raise ValueError(
                f"Replica {contribution.sender} says it computed on version {contribution.read_version}; "
                f"the shard is at {self.version}."
            )

    def _check_replica(self, replica: int) -> None:
        if isinstance(replica, bool) or not isinstance(replica, int) or not 0 <= replica < self._replicas:
            raise ValueError(f"replica={replica!r}: expected an integer from 0 to {self._replicas - 1}.")
