"""What composes: one table, checked when a strategy meets its precision plugin, and printed in the README."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_sync import aggregators, compressors
from lightning_sync.aggregators import Aggregator
from lightning_sync.compressors import Compressor, Route

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
MODES = ("strict", "unwrapped")


@dataclass(frozen=True)
class Refusal:
    """A combination that is not allowed. Every field is a pattern, as a shell would match it."""

    mode: str
    compressor: str
    aggregator: str
    precision: str
    reason: str

    def covers(self, mode: str, compressor: str, aggregator: str, precision: str) -> bool:
        """Whether this refusal applies."""
        pairs = zip(
            (self.mode, self.compressor, self.aggregator, self.precision),
            (mode, compressor, aggregator, precision),
            strict=True,
        )
        return all(fnmatch.fnmatchcase(value, pattern) for pattern, value in pairs)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "unwrapped",
        "[!n]*",
        "*",
        "*",
        "inside a replica gradients are averaged exactly; leave the compressor out",
    ),
    *(
        Refusal("*", "[!n]*", "*", p, "this plugin converts gradients itself, which was never tested with compression")
        for p in ("transformer-engine*", "nf4*", "fp4*", "int8*")
    ),
)


def refusal(mode: str, compressor: str, aggregator: str, precision: str) -> str | None:
    """The reason why this combination is refused, `None` if it is not."""
    return next((r.reason for r in REFUSALS if r.covers(mode, compressor, aggregator, precision)), None)


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


def table(modes: Iterable[str] = ("strict",)) -> str:
    """The combinations as a Markdown table: one row per mode and compressor, one column per precision."""
    lines = ["| strategy | compressor | " + " | ".join(PRECISIONS) + " |", "|---|---|" + "---|" * len(PRECISIONS)]
    for mode in modes:
        for name in compressors.registry:
            cells = [refusal(mode, name, "mean", p) or "yes" for p in PRECISIONS]
            lines.append(f"| {mode} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
