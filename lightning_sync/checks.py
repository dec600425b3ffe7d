"""Checks of arguments, at construction: the message names the argument, its value and what is accepted."""

from __future__ import annotations

import re


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_seconds(owner: str, **values: object) -> None:
    """Each is `None` or a number of seconds above 0."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and value > 0):  # type: ignore[operator]
            raise ValueError(f"{owner}({name}={value!r}): expected a number of seconds above 0.")


def check_positive(owner: str, **values: object) -> None:
    """Each is `None` or a number above 0."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and value > 0):  # type: ignore[operator]
            raise ValueError(f"{owner}({name}={value!r}): expected a number above 0.")


def check_integer(owner: str, lowest: int, **values: object) -> None:
    """Each is an integer of at least `lowest`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ValueError(f"{owner}({name}={value!r}): expected an integer of at least {lowest}.")


def check_flags(owner: str, **values: object) -> None:
    """Each is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{owner}({name}={value!r}): expected True or False.")


def check_share(owner: str, **values: object) -> None:
    """Each is a number in [0, 1]."""
    for name, value in values.items():
        if not (_is_number(value) and 0 <= value <= 1):  # type: ignore[operator]
            raise ValueError(f"{owner}({name}={value!r}): expected a number in [0, 1].")


def check_choice(owner: str, choices: tuple[object, ...], **values: object) -> None:
    """Each is one of `choices`."""
    for name, value in values.items():
        if value not in choices:
            accepted = ", ".join(map(repr, choices))
            raise ValueError(f"{owner}({name}={value!r}): expected one of {accepted}.")


def plain_repr(value: object) -> str:
    """How something prints, without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
