"""Positions of stateful data loaders: Lightning saves rank 0's for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sync.checkpoint.plain import to_plain

# Every rank assembles the whole checkpoint, with its own loaders in it; only rank 0's is written.
_WHERE = ("loops", "fit_loop", "state_dict")
_KEY = "combined_loader"


def loader_states(checkpoint: Mapping[str, Any]) -> list[Any] | None:
    """This rank's states of the training loaders that have any, from a checkpoint before it is written.

    `None` if there are none, or if they hold more than tensors, numbers and strings, which is said.
    """
    states = _loop(checkpoint).get(_KEY)
    if not isinstance(states, list) or not states:
        return None
    try:
        return list(to_plain(states, "the state of a data loader"))
    except TypeError as error:
        rank_zero_warn(
            f"The positions of the ranks' data loaders are not saved: {error} In the middle of an epoch, all ranks "
            "will resume where rank 0 was."
        )
        return None


def set_loader_states(checkpoint: Mapping[str, Any], states: list[Any] | None) -> None:
    """Put this rank's states in the place of rank 0's, before Lightning reads them."""
    loop = _loop(checkpoint)
    if states is not None and isinstance(loop, dict):
        loop[_KEY] = states


def _loop(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    value: Any = checkpoint
    for key in _WHERE:
        value = value.get(key, {}) if isinstance(value, Mapping) else {}
    return value if isinstance(value, Mapping) else {}
