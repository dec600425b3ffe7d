"""What a rule for contributions must provide. A new rule is one file with one class.

A *contribution* is what a replica sends to the owner of a shard: a delta (the parameters it started from, minus where
it arrived) or a gradient. A *rule* says by which change a shard answers. Both have the sign of a gradient, so the
owner either subtracts the change from its values or hands it to an optimiser as the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Contribution:
    """What one replica sends to one shard, once.

    Attributes:
        sender: The replica's number.
        sequence: 0, 1, 2, ... per sender and shard: how a repetition is told from something new.
        values: The shard's part of the delta or gradient, `[n]`, in the shard's dtype (float32).
        read_version: The shard's version that the sender computed on.
        clock: The sender's clock, that is the number of this update.
        weight: What the change is multiplied by; for deltas usually 1 / number of replicas, with 1 every replica's
            whole progress is added up (the classic parameter server). Higher learns faster and diverges sooner.
        samples: Samples, or tokens, that went into it.
        steps: Optimiser steps that went into it.
    """

    sender: int
    sequence: int
    values: Tensor
    read_version: int
    clock: int
    weight: float = 1.0
    samples: float = 1.0
    steps: int = 1


@dataclass(frozen=True)
class Facts:
    """What the owner knows of a contribution when it arrives.

    Attributes:
        staleness: The shard's version now, minus the version the contribution was computed on.
        read_values: The values the sender computed on, `[n]`; None unless the rule's `needs_backup` is True.
        now: Seconds of training so far; they never run backwards.
        living: The replicas that may still send something.
    """

    staleness: int
    read_values: Tensor | None
    now: float
    living: Collection[int]


class Rule(ABC):
    """How a shard answers contributions: a frozen dataclass of constants; what it remembers is a dict of tensors.

    `change` is a pure function apart from `state`, whose tensors it may change in place and whose entries it may add
    and remove. `values` it never changes. The tensor it returns is used up before the next call, so it may be one of
    the state's or the contribution's, but only where the next call does not rely on its contents: the owner never
    writes to it, an optimiser may.
    """

    pushes: ClassVar[tuple[str, ...]] = ("delta", "gradient")
    """What the rule is defined for."""
    needs_backup: ClassVar[bool] = False
    """Whether it wants the values a contribution was computed on: the owner then keeps what each replica has read."""
    uses_weight: ClassVar[bool] = True
    """Whether `Contribution.weight` counts; a strategy refuses a weight where it does not."""
    reads_first: ClassVar[bool] = False
    """Whether a delta is measured from values read just before it is sent, not from those read after the last one."""

    holds_back: ClassVar[bool] = False
    """Whether what has arrived may wait for more before it changes the values, so that no bound on reading can hold."""

    def for_replicas(self, replicas: int) -> Rule:
        """The rule for a run of this many replicas, where one of its constants depends on that."""
        return self

    def init(self, values: Tensor) -> dict[str, Tensor]:
        """The state before the first contribution: named tensors, such as zeros like `values` `[n]`."""
        return {}

    @abstractmethod
    def change(
        self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]
    ) -> Tensor | None:
        """What to subtract from `values` now, `[n]`; None if nothing is to happen yet.

        Args:
            values: The shard, `[n]`.
            contribution: What has arrived.
            facts: What is known of it.
            state: What the rule remembers, from `init`.
        """

    def due(self, state: dict[str, Tensor], living: Collection[int]) -> float | None:
        """When the owner should call `release`, in seconds of training, if nothing arrives before; None: never."""
        return None

    def release(self, values: Tensor, now: float, living: Collection[int], state: dict[str, Tensor]) -> Tensor | None:
        """The change that time alone has made due, like that of `change`; None if there is none."""
        return None

    def flush(self, values: Tensor, state: dict[str, Tensor]) -> Tensor | None:
        """The change that makes everything delivered so far count, where nothing more will come; None if none."""
        return None

    def forget(self, replica: int, state: dict[str, Tensor]) -> None:
        """A replica has left; what it has sent stays."""
        return

    def next_local(self, local: Tensor, delta: Tensor, read: Tensor) -> Tensor:
        """Where a replica goes on after an exchange, before what it has done in the meantime is added again.

        Args:
            local: Its parameters when it measured `delta`, `[n]`.
            delta: What it sent.
            read: The owner's values that contain all its contributions.
        """
        return read
