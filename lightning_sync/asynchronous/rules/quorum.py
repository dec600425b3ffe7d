"""Outer steps by quorum: decoupled DiLoCo."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import nan
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.asynchronous.grace import Rhythm, grace_ends, heard, left
from lightning_sync.asynchronous.rules.base import Contribution, Facts, Rule
from lightning_sync.checks import check_choice, check_integer

_PENDING, _COUNTS, _RHYTHM, _QUORUM_AT = "pending.", "counts.", "rhythm.", "quorum_at"


@dataclass(frozen=True)
class Quorum(Rule):
    r"""Collect deltas; take a step when enough replicas have delivered and a grace window for the others has passed.

    With D_m the sum of what replica m has sent since the last step, n_m its samples and s_m its optimiser steps:

    .. math:: \Delta = \frac{\sum_m w_m D_m}{\sum_m w_m}, \qquad w_m = n_m, \quad n_m^2 / s_m \quad\text{or}\quad 1

    Delta goes to the owner's optimiser (DiLoCo's: `Nesterov`); without one the shard moves by it. Decoupled DiLoCo
    (Douillard et al. 2026, arXiv 2604.21428): n_m^2 / s_m, tokens times tokens per step, is the weight given there.
    Two things are ours: the window's formula (`grace.grace_ends`), and that a replica that delivers twice
    before a step has both deltas added, so that nothing is lost or counted twice. No replica waits for a step:
    it goes on from its own parameters and takes the new values over when they come.

    For deltas. `Contribution.weight` does not count. Memory: on the owners, 4 bytes per parameter for each replica that
    has delivered since the last step, and the optimiser's.

    Args:
        quorum: Replicas that must have delivered, at least; of those alive where they are fewer. Higher averages over
            more and steps less often. 1 with grace 0 steps at every delivery.
        grace: The longest wait after that, as a share of the usual time between two deliveries. Higher includes slower
            replicas and makes steps later.
        weigh_by: ``"samples"`` (samples or tokens, whatever `Contribution.samples` counts), ``"samples_and_rate"`` (the
            paper's), or ``"equal"``.
    """

    quorum: int = 1
    grace: float = 0.5
    weigh_by: str = "samples"
    pushes: ClassVar[tuple[str, ...]] = ("delta",)
    uses_weight: ClassVar[bool] = False
    holds_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("Quorum", 1, quorum=self.quorum)
        if isinstance(self.grace, bool) or not isinstance(self.grace, (int, float)) or not self.grace >= 0:
            raise ValueError(f"Quorum(grace={self.grace!r}): expected a number of at least 0.")
        check_choice("Quorum", ("samples", "samples_and_rate", "equal"), weigh_by=self.weigh_by)

    @override
    def init(self, values: Tensor) -> dict[str, Tensor]:
        """When the quorum was complete, seconds; the rest appears with the replicas, as `pending.0` `[n]`."""
        return {_QUORUM_AT: torch.tensor(nan, dtype=torch.float64)}

    @override
    def change(
        self, values: Tensor, contribution: Contribution, facts: Facts, state: dict[str, Tensor]
    ) -> Tensor | None:
        """Delta if this delivery makes the step due, else None."""
        sender = str(contribution.sender)
        before = state.get(_RHYTHM + sender)
        state[_RHYTHM + sender] = _to_tensor(heard(None if before is None else Rhythm(*before.tolist()), facts.now))
        counts = torch.tensor([contribution.samples, contribution.steps], dtype=torch.float64)
        if _PENDING + sender in state:
            state[_PENDING + sender].add_(contribution.values)
            state[_COUNTS + sender].add_(counts)
        else:
            state[_PENDING + sender], state[_COUNTS + sender] = contribution.values.clone(), counts
        self._note_quorum(facts.now, facts.living, state)
        return self.release(values, facts.now, facts.living, state)

    @override
    def due(self, state: dict[str, Tensor], living: Collection[int]) -> float | None:
        """The end of the grace window; None before the quorum is complete."""
        quorum_at = float(state[_QUORUM_AT])
        if quorum_at != quorum_at:
            return None
        rhythms = _rhythms(state)
        missing = [r for r in living if f"{_PENDING}{r}" not in state]
        return grace_ends(quorum_at, self.grace, rhythms, missing)

    @override
    def release(self, values: Tensor, now: float, living: Collection[int], state: dict[str, Tensor]) -> Tensor | None:
        """Delta if the window has passed."""
        self._note_quorum(now, living, state)  # a death may have completed it
        due = self.due(state, living)
        if due is None or now < due:
            return None
        return self.flush(values, state)

    @override
    def flush(self, values: Tensor, state: dict[str, Tensor]) -> Tensor | None:
        """Delta of whatever has been delivered since the last step, by however few."""
        senders = [key.removeprefix(_PENDING) for key in state if key.startswith(_PENDING)]
        if not senders:
            return None
        weights = [self._weight(*state.pop(_COUNTS + s).tolist()) for s in senders]
        total = sum(weights)
        merged = torch.zeros_like(values)
        for sender, weight in zip(senders, weights, strict=True):
            # All weights 0 (nobody saw a sample) means plain averaging and not a division by 0.
            merged.add_(state.pop(_PENDING + sender), alpha=weight / total if total else 1 / len(senders))
        state[_QUORUM_AT].fill_(nan)
        return merged

    @override
    def forget(self, replica: int, state: dict[str, Tensor]) -> None:
        """Nobody knows when a replica that has left will deliver again; what it has delivered counts."""
        rhythm = state.get(f"{_RHYTHM}{replica}")
        if rhythm is not None:
            state[f"{_RHYTHM}{replica}"] = _to_tensor(left(Rhythm(*rhythm.tolist())))

    def _note_quorum(self, now: float, living: Collection[int], state: dict[str, Tensor]) -> None:
        delivered = sum(key.startswith(_PENDING) for key in state)
        complete = delivered >= max(1, min(self.quorum, len(living)))
        if complete and bool(state[_QUORUM_AT].isnan()):
            state[_QUORUM_AT].fill_(now)

    def _weight(self, samples: float, steps: float) -> float:
        if self.weigh_by == "equal":
            return 1.0
        return samples if self.weigh_by == "samples" else samples * samples / max(steps, 1.0)


def _rhythms(state: dict[str, Tensor]) -> dict[int, Rhythm]:
    return {int(k.removeprefix(_RHYTHM)): Rhythm(*v.tolist()) for k, v in state.items() if k.startswith(_RHYTHM)}


def _to_tensor(rhythm: Rhythm) -> Tensor:
    return torch.tensor([rhythm.last, rhythm.gap, rhythm.deviation], dtype=torch.float64)
