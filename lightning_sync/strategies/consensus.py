"""Shows the model as all replicas agree on it, and the replica's own parameters again afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_sync.state import canonical_name


class ConsensusView:
    """Swaps the consensus in and out.

    Args:
        module: The model. Memory while the consensus is shown: a copy of what it replaces.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[tuple[Tensor, Tensor]] = []

    @property
    def shown(self) -> bool:
        """Whether the consensus is in place of the replica's own values."""
        return bool(self._kept)

    @torch.no_grad()
    def show(self, values: Mapping[str, Tensor]) -> None:
        """Put `values`, by name, in place of parameters and buffers."""
        if self._kept:
            return
        targets = [(t, values[n]) for n, t in _tensors(self._module).items() if n in values]
        self._kept = [(target, target.detach().clone()) for target, _ in targets]
        for target, value in targets:
            target.copy_(value)

    @torch.no_grad()
    def hide(self) -> None:
        """Put the replica's own values back, bit for bit."""
        for target, own in self._kept:
            target.copy_(own)
        self._kept = []

    def replace(self, state_dict: Mapping[str, Any], values: Mapping[str, Tensor]) -> dict[str, Any]:
        """A state dict of the module with `values` in it, as copies in the module's dtypes."""
        names = {id(t): n for n, t in _tensors(self._module).items()}
        live = self._module.state_dict(keep_vars=True)
        replaced = dict(state_dict)
        for key in state_dict.keys() & live.keys():
            name = names.get(id(live[key]))
            if name is not None and name in values:
                replaced[key] = values[name].detach().to(live[key].device, live[key].dtype, copy=True)
        return replaced


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {canonical_name(name): tensor for name, tensor in named}


def refuse_averaging_callbacks(trainer: Trainer, mode: str) -> None:
    """Refuse callbacks that average a model over time, where a rank has only its replica's parameters.

    Raises:
        ValueError: naming the callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages the parameters that it sees after every step. Under "
                f"strategy={mode!r} those are one replica's, not the ones that all agree on. Leave the callback out "
                "(exchanges average already), or use strategy='strict'."
            )
