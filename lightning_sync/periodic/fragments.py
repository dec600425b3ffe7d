"""Parts of a model that travel one after the other."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from lightning_sync.state import ParamSpec

Fragments = int | Sequence[str | Sequence[str]]


def check_fragments(fragments: Fragments) -> int:
    """The number of fragments; raises for a value that cannot be one."""
    if isinstance(fragments, (bool, float, str, type(None))) or (isinstance(fragments, int) and fragments < 1):
        raise ValueError(f"fragments={fragments!r}: expected a number of at least 1, or patterns per fragment.")
    if isinstance(fragments, int):
        return fragments
    patterns = [[f] if isinstance(f, str) else list(f) for f in fragments]
    if not patterns or not all(p and all(isinstance(s, str) and s for s in p) for p in patterns):
        raise ValueError(f"fragments={fragments!r}: expected a number, or patterns for parameter names per fragment.")
    return len(patterns)


def split(params: Sequence[ParamSpec], fragments: Fragments) -> list[list[ParamSpec]]:
    """Divide parameters into fragments.

    Args:
        params: In registration order.
        fragments: A number: consecutive parameters, of about equal size in elements. Or, for every fragment, one or
            several patterns for parameter names, as a shell matches them (``["embed*", ["blocks.0.*", "head.*"]]``).

    Raises:
        ValueError: if there are fewer parameters than fragments, or if patterns miss a parameter, give one to two
            fragments, or match nothing.
    """
    if isinstance(fragments, int):
        return _by_size(params, fragments)
    patterns = [[f] if isinstance(f, str) else list(f) for f in fragments]
    homes = {p.name: [i for i, ps in enumerate(patterns) if _matches(p.name, ps)] for p in params}
    missed = [name for name, home in homes.items() if not home]
    repeated = [name for name, home in homes.items() if len(home) > 1]
    empty = [patterns[i] for i in range(len(patterns)) if not any(i in home for home in homes.values())]
    if missed or repeated or empty:
        problems = [
            f"{what}: {', '.join(map(str, which))}"
            for what, which in (("not in any", missed), ("in several", repeated), ("matches nothing", empty))
            if which
        ]
        raise ValueError(f"fragments={fragments!r}: every parameter must be in one fragment; {'; '.join(problems)}.")
    return [[p for p in params if i in homes[p.name]] for i in range(len(patterns))]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _by_size(params: Sequence[ParamSpec], number: int) -> list[list[ParamSpec]]:
    if number > len(params):
        raise ValueError(f"fragments={number}: this model has only {len(params)} parameters that take gradients.")
    total = sum(p.numel for p in params) or 1
    parts: list[list[ParamSpec]] = [[] for _ in range(number)]
    before, part = 0, 0
    for i, param in enumerate(params):
        # The fragment in which this parameter's middle lies, but none may stay empty.
        wanted = min(number - 1, int((before + param.numel / 2) * number / total))
        part = max(part, min(wanted, part + 1 if parts[part] else part))
        part = max(part, number - (len(params) - i))
        parts[part].append(param)
        before += param.numel
    return parts
