"""What composes: one table, checked when a strategy meets its precision plugin, and printed in the README."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_sync import aggregators, compressors
from lightning_sync.aggregators import Aggregator
from lightning_sync.compressors import Compressor, Route

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
COMPRESSED = "anything but none"
WRAPPERS = ("ddp", "fsdp", "deepspeed", "model_parallel")


@dataclass(frozen=True)
class Refusal:
    """A combination that is not allowed. Every field is a pattern, as a shell would match it, or `COMPRESSED`."""

    mode: str
    compressor: str
    aggregator: str
    precision: str
    wrapper: str
    reason: str

    def covers(self, mode: str, compressor: str, aggregator: str, precision: str, wrapper: str) -> bool:
        """Whether this refusal applies."""
        patterns = (self.mode, self.compressor, self.aggregator, self.precision, self.wrapper)
        pairs = zip(patterns, (mode, compressor, aggregator, precision, wrapper), strict=True)
        return all(_matches(pattern, value) for pattern, value in pairs)


def _matches(pattern: str, value: str) -> bool:
    return value != "none" if pattern == COMPRESSED else fnmatch.fnmatchcase(value, pattern)


REFUSALS: tuple[Refusal, ...] = (
    Refusal("*", "*", "*", "*", "fsdp", "parameters are sharded: no rank holds the gradient a compressor needs"),
    Refusal("*", "*", "*", "*", "deepspeed", "DeepSpeed reduces gradients itself"),
    Refusal("*", "*", "*", "*", "model_parallel", "parameters are sharded: no rank holds a whole gradient"),
    Refusal("unwrapped", COMPRESSED, "*", "*", "*", "inside a replica gradients are averaged exactly; leave it out"),
    *(
        Refusal("*", COMPRESSED, "*", p, "*", "this plugin converts gradients itself; never tested with compression")
        for p in ("transformer-engine*", "nf4*", "fp4*", "int8*")
    ),
)


def refusal(mode: str, compressor: str, aggregator: str, precision: str, wrapper: str = "ddp") -> str | None:
    """The reason why this combination is refused, `None` if it is not."""
    return next((r.reason for r in REFUSALS if r.covers(mode, compressor, aggregator, precision, wrapper)), None)


def check_combination(mode: str, compressor: Compressor | Route, aggregator: Aggregator, precision: str) -> None:
    """Raise if these do not compose.

    Raises:
        ValueError: naming the four choices and the reason.
    """
    names = (mode, compressors.registry.name(compressor), aggregators.registry.name(aggregator), precision)
    reason = refusal(*names)
    if reason is not None:
        raise ValueError(
            f"strategy={names[0]!r} with compressor={names[1]!r}, aggregator={names[2]!r} and precision={names[3]!r} "
            f"is refused: {reason}."
        )


def table(modes: Iterable[str] = ("strict", "hybrid", "delayed")) -> str:
    """The combinations as a Markdown table: a row per compressor (and modes), a column per precision and wrapper."""
    columns = [*PRECISIONS, *WRAPPERS[1:]]
    modes = tuple(modes)
    lines = [f"| strategy | compressor | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    reasons: list[str] = []

    def cell(reason: str | None) -> str:
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    for name in compressors.registry:
        rows: dict[tuple[str, ...], list[str]] = {}
        for mode in modes:
            cells = [cell(refusal(mode, name, "mean", p)) for p in PRECISIONS]
            cells += [cell(refusal(mode, name, "mean", "32-true", w)) for w in WRAPPERS[1:]]
            rows.setdefault(tuple(cells), []).append(mode)
        lines += [f"| {', '.join(alike)} | {name} | {' | '.join(cells)} |" for cells, alike in rows.items()]
    return "\n".join([*lines, "", *(f"({i}) {reason}." for i, reason in enumerate(reasons, 1))])
