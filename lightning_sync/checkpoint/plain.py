"""Plain values: all that a state file may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class StateFileError(ValueError):
    """A file of saved state is damaged, incomplete, or not what its manifest says. Nothing of it was used."""


def require(condition: bool, what: str) -> None:
    """Raise StateFileError unless `condition` holds."""
    if not condition:
        raise StateFileError(what)


def to_plain(value: Any, where: str, *, copy: bool = True) -> Any:
    """A copy on the CPU of nested dicts, lists, tuples, tensors, numbers, strings and `None`.

    Args:
        value: What is copied.
        where: What errors call it.
        copy: Copy tensors even if they are on the CPU already.

    Raises:
        TypeError: for anything else, since loading it would mean to run code from a file.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=copy, memory_format=torch.contiguous_format)
    if isinstance(value, Mapping) and all(type(k) in (bool, int, float, str) for k in value):
        return {k: to_plain(v, f"{where}[{k!r}]", copy=copy) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(v, f"{where}[{i}]", copy=copy) for i, v in enumerate(value))
    raise TypeError(
        f"{where} is a {type(value).__name__}. Saved state may hold tensors, numbers, strings, and dicts and lists of "
        "them; convert it, or leave it out."
    )


def is_tensors(value: object) -> bool:
    """Whether this is a dict of dense CPU tensors by name."""
    return isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(t, Tensor) and t.layout is torch.strided and t.device.type == "cpu"
        for k, t in value.items()
    )


def is_count(value: object) -> bool:
    """Whether this is an integer of at least 0."""
    return type(value) is int and value >= 0


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
