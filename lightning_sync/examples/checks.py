"""Says which argument of an example is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def check_integers(low: int, values: Mapping[str, Any]) -> None:
    """Check whole numbers.

    Args:
        low: The least that is accepted.
        values: The arguments by name.

    Raises:
        ValueError: If one is not a whole number, or is below ``low``.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name}={value} must be a whole number of at least {low}.")


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Check a real number.

    Args:
        name: The argument.
        value: Its value.
        low: The least that is accepted.
        high: The first that is too high; the default accepts every finite number.
        open_low: Whether ``low`` itself is refused.

    Raises:
        ValueError: If it is not a number or lies outside.
    """
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not right or not low <= value < high or (open_low and value == low):
        left = "above" if open_low else "of at least"
        below = "" if math.isinf(high) else f" and below {high:g}"
        raise ValueError(f"{name}={value} must be a finite number {left} {low:g}{below}.")
