"""What composes: one table, checked when a strategy meets its precision plugin, and printed in the README."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_sync import aggregators, compressors
from lightning_sync.aggregators import Aggregator
from lightning_sync.asynchronous.codec import codec_for
from lightning_sync.compressors import Compressor, Route, as_route
from lightning_sync.reducer import carried

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
WRAPPERS = ("ddp", "fsdp", "deepspeed", "model_parallel")
MODES = ("strict", "hybrid", "delayed", "asynchronous")
COMPRESSED = "anything but none"
NOT_A_MEAN = "anything but a mean"
UNPAIRED = "what needs all ranks at once"
UNCARRIED = "what does not carry the aggregator"


@dataclass(frozen=True)
class Refusal:
    """A combination that is not allowed.

    Every field is a pattern, as a shell would match it; the compressor's may be `COMPRESSED`, `UNPAIRED` or
    `UNCARRIED`, the aggregator's `NOT_A_MEAN`.
    """

    mode: str
    compressor: str
    aggregator: str
    precision: str
    wrapper: str
    reason: str

    def covers(
        self,
        mode: str,
        compressor: Compressor | Route | str,
        aggregator: Aggregator | str,
        precision: str,
        wrapper: str,
    ) -> bool:
        """Whether this refusal applies."""
        if self.compressor == UNCARRIED and is_carried(compressor, aggregator):
            return False
        if self.compressor == UNPAIRED and is_paired(compressor):
            return False
        names = (mode, compressor_name(compressor), aggregator_name(aggregator), precision, wrapper)
        patterns = (self.mode, self.compressor, self.aggregator, self.precision, self.wrapper)
        return all(_matches(pattern, name) for pattern, name in zip(patterns, names, strict=True))


def _matches(pattern: str, name: str) -> bool:
    if pattern == COMPRESSED:
        return name != "none"
    if pattern == NOT_A_MEAN:
        return name not in ("mean", "weighted_mean")
    return pattern in (UNCARRIED, UNPAIRED) or fnmatch.fnmatchcase(name, pattern)


def is_carried(compressor: Compressor | Route | str, aggregator: Aggregator | str) -> bool:
    """Whether a compressor hands over all that an aggregator needs to see, for every parameter that it may serve."""
    route = as_route(compressors.registry.build(compressor))
    chosen = aggregators.registry.build(aggregator)
    return all(carried(c, chosen) is not None for _, c in route.rules)


def is_paired(compressor: Compressor | Route | str) -> bool:
    """Whether a compressor can serve one sender and one reader."""
    try:
        codec_for(compressors.registry.build(compressor))
    except ValueError:
        return False
    return True


def compressor_name(compressor: Compressor | Route | str) -> str:
    """Its short name."""
    return compressor if isinstance(compressor, str) else compressors.registry.name(compressor)


def aggregator_name(aggregator: Aggregator | str) -> str:
    """Its short name."""
    return aggregator if isinstance(aggregator, str) else aggregators.registry.name(aggregator)


REFUSALS: tuple[Refusal, ...] = (
    Refusal("*", "*", "*", "*", "fsdp", "parameters are sharded: no rank holds the gradient a compressor needs"),
    Refusal("*", "*", "*", "*", "deepspeed", "DeepSpeed reduces gradients itself"),
    Refusal("*", "*", "*", "*", "model_parallel", "parameters are sharded: no rank holds a whole gradient"),
    Refusal("unwrapped", COMPRESSED, "*", "*", "*", "inside a replica gradients are averaged exactly; leave it out"),
    Refusal("unwrapped", "*", NOT_A_MEAN, "*", "*", "inside a replica gradients are averaged exactly; leave it out"),
    Refusal("hybrid", "*", "majority_vote", "*", "*", "votes have no size, so no anchor can be moved by them"),
    Refusal("asynchronous", "*", NOT_A_MEAN, "*", "*", "contributions come one by one; say how by `rule` and `weight`"),
    Refusal("asynchronous", UNPAIRED, "*", "*", "*", "it needs all ranks at once, but an exchange has two ends"),
    Refusal("*", UNCARRIED, "*", "*", "*", "it is a sum on the wire, which hides each rank's contribution"),
    *(
        Refusal("*", c, a, p, "*", "this plugin converts gradients itself; never tested with compression")
        for p in ("transformer-engine*", "nf4*", "fp4*", "int8*")
        for c, a in ((COMPRESSED, "*"), ("*", NOT_A_MEAN))
    ),
)


def refusal(
    mode: str,
    compressor: Compressor | Route | str,
    aggregator: Aggregator | str,
    precision: str,
    wrapper: str = "ddp",
) -> str | None:
    """The reason why this combination is refused, `None` if it is not."""
    return next((r.reason for r in REFUSALS if r.covers(mode, compressor, aggregator, precision, wrapper)), None)


def check_combination(mode: str, compressor: Compressor | Route, aggregator: Aggregator, precision: str) -> None:
    """Raise if these do not compose.

    Raises:
        ValueError: naming the four choices and the reason.
    """
    reason = refusal(mode, compressor, aggregator, precision)
    if reason is not None:
        names = (mode, compressor_name(compressor), aggregator_name(aggregator), precision)
        raise ValueError(
            f"strategy={names[0]!r} with compressor={names[1]!r}, aggregator={names[2]!r} and precision={names[3]!r} "
            f"is refused: {reason}."
        )


def table(modes: Iterable[str] = MODES) -> str:
    """The combinations as a Markdown table: a row per compressor (and modes), a column per precision and wrapper."""
    columns = [*PRECISIONS, *WRAPPERS[1:]]
    rows = [
        (
            mode,
            name,
            [refusal(mode, name, "mean", p) for p in PRECISIONS]
            + [refusal(mode, name, "mean", "32-true", w) for w in WRAPPERS[1:]],
        )
        for name in compressors.registry
        for mode in modes
    ]
    return _markdown(("strategy", "compressor", *columns), rows)


def aggregator_table(modes: Iterable[str] = MODES) -> str:
    """The same for aggregators: a row per aggregator (and modes), a column per compressor."""
    columns = list(compressors.registry)
    rows = [
        (mode, name, [refusal(mode, c, name, "32-true") for c in columns])
        for name in aggregators.registry
        for mode in modes
    ]
    return _markdown(("strategy", "aggregator", *columns), rows)


def _markdown(header: Sequence[str], rows: Sequence[tuple[str, str, list[str | None]]]) -> str:
    """Rows of a mode, a name and reasons; modes that agree share a row, and reasons stand below."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    reasons = list(dict.fromkeys(reason for _, _, cells in rows for reason in cells if reason is not None))
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for mode, name, found in rows:
        cells = tuple("yes" if reason is None else f"no ({reasons.index(reason) + 1})" for reason in found)
        merged.setdefault((name, cells), []).append(mode)
    lines += [f"| {', '.join(modes)} | {name} | {' | '.join(cells)} |" for (name, cells), modes in merged.items()]
    return "\n".join([*lines, "", *(f"({i}) {reason}." for i, reason in enumerate(reasons, 1))])
