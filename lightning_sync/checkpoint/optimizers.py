"""Optimisers' states by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_sync.checkpoint.plain import StateFileError


def optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """``{"state": {name: {...}}, "groups": [{"params": [name, ...], ...}]}``; unnamed parameters by their position."""
    by_position = _names(optimizer, names)
    saved = optimizer.state_dict()
    flat = [name for group in by_position for name in group]
    return {
        "state": {flat[index]: dict(state) for index, state in saved["state"].items()},
        "groups": [
            {**group, "params": members} for group, members in zip(saved["param_groups"], by_position, strict=True)
        ],
    }


def fitting(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, from what `optimizer_state` returned.

    Raises:
        StateFileError: if it is the state of an optimiser of other parameters.
    """
    by_position = _names(optimizer, names)
    try:
        saved = [list(group["params"]) for group in state["groups"]]
        if saved != by_position:
            raise StateFileError(
                f"the saved optimiser has groups of {[len(g) for g in saved]} parameters, the optimiser of this run of "
                f"{[len(g) for g in by_position]}, or their names differ. Make it as it was when the run was saved."
            )
        index = {name: i for i, name in enumerate(name for group in saved for name in group)}
        groups = [
            {**group, "params": [index[name] for name in members]}
            for group, members in zip(state["groups"], saved, strict=True)
        ]
        return {"state": {index[name]: dict(value) for name, value in state["state"].items()}, "param_groups": groups}
    except (KeyError, TypeError) as error:
        raise StateFileError(f"the saved state of an optimiser is not valid: {error!r}") from error


def _names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    counted = 0
    groups: list[list[str]] = []
    for group in optimizer.param_groups:
        members: Sequence[nn.Parameter] = group["params"]
        groups.append([names.get(p, f"#{counted + i}") for i, p in enumerate(members)])
        counted += len(members)
    return groups
