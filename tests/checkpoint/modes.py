"""A mode for tests that keeps state of every sort: shared by all ranks, of each rank alone, and numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import lightning_sync as ls
from lightning_sync.checkpoint import ModeState
from lightning_sync.state import canonical_name


class Anchored(ls.UnwrappedStrategy):
    """Nothing is sent between replicas; every third step each is drawn half-way to an anchor, which drifts."""

    mode = "anchored"

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        self.anchor = {canonical_name(n): p.detach().clone() for n, p in module.named_parameters()}
        self.velocity = {n: torch.zeros_like(p) for n, p in self.anchor.items()}
        self.clock = 0

    def after_backward(self) -> None:
        super().after_backward()
        if self._blocked:
            return
        self.clock += 1
        module = self.lightning_module
        assert module is not None
        with torch.no_grad():
            for name, p in module.named_parameters():
                key = canonical_name(name)
                self.anchor[key].mul_(0.99)
                self.velocity[key].mul_(0.5).add_(self.anchor[key] - p)
                if self.clock % 3 == 0:
                    p.lerp_(self.anchor[key] + 0.01 * self.velocity[key], 0.5)

    def mode_state(self) -> ModeState:
        return ModeState(
            {"clock": self.clock, "own": self.global_rank}, {"anchor": self.anchor}, {"velocity": self.velocity}
        )

    def load_mode_state(self, state: ModeState, *, same: bool) -> Sequence[str]:
        _copy(state.replicated["anchor"], self.anchor)
        self.clock = int(state.numbers["clock"] or 0)
        if same:
            assert state.numbers["own"] == self.global_rank
            _copy(state.local["velocity"], self.velocity)
        return []


def _copy(values: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])
