"""Reads what `SyncMonitor` has written: the runs that a report compares."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sync.monitor.records import FOLDER, FORMAT, file_name

Record = dict[str, Any]

#: Totals that begin again at a resume.
_AFRESH = ("stepping_seconds", "samples")
#: Totals that a checkpoint carries on, where anything is counted.
_CARRIED = ("steps", "exchanges", "skipped_steps", "sent_bytes", "network_bytes", "dense_bytes", "dense_network_bytes")
_TIMES = ("wait_seconds", "encode_seconds", "wire_seconds", "decode_seconds")


class NoRunError(Exception):
    """There is nothing to report in a directory; the message says what was looked for."""


@dataclass
class Rank:
    """What one rank has written, resumes joined: totals go on, and what was repeated after a resume stands once.

    Attributes:
        steps: The ``start`` record of the first start, then all ``step`` records, by rising step.
        validations: The ``validation`` records.
        ended: Whether training has ended well.
    """

    about: Record
    steps: list[Record] = field(default_factory=list)
    validations: list[Record] = field(default_factory=list)
    ended: bool = False


@dataclass
class Run:
    """A run directory.

    Attributes:
        name: As tables and figures call it.
        path: Where it is.
        ranks: By rank, those whose files could be read.
        problems: What is missing or broken, in sentences.
    """

    name: str
    path: Path
    ranks: dict[int, Rank]
    problems: list[str]

    @property
    def about(self) -> Record:
        """What the first rank has said of the run when it started."""
        return next(iter(self.ranks.values())).about

    @property
    def ended(self) -> bool:
        """Whether all ranks have ended well."""
        return len(self.ranks) == self.about["world_size"] and all(rank.ended for rank in self.ranks.values())

    @property
    def last_step(self) -> int:
        """The step of the last record."""
        return max(int(rank.steps[-1]["step"]) for rank in self.ranks.values())

    def series(self, name: str, over: Callable[[Sequence[float]], float] | None = None) -> dict[int, float]:
        """A number by step, over the ranks that have it: their mean, or what `over` makes of their values."""
        values: dict[int, list[float]] = {}
        for rank in self.ranks.values():
            for record in rank.steps:
                if record.get(name) is not None:
                    values.setdefault(int(record["step"]), []).append(float(record[name]))
        return {step: (over or mean)(found) for step, found in sorted(values.items())}

    def validation(self, name: str = "val_loss") -> dict[int, float]:
        """A metric of validation by step, as the first rank has it."""
        rank = next(iter(self.ranks.values()))
        return {int(r["step"]): float(r[name]) for r in rank.validations if r.get(name) is not None}

    def per_step(self, name: str) -> float | None:
        """Mean gain of a total per step, over the ranks; without the first record, which holds start-up costs."""
        found = [gain / steps for gain, steps in (_gain(r, name) for r in self.ranks.values()) if gain is not None]
        return mean(found) if found else None

    def samples_per_second(self) -> float | None:
        """Of all ranks together."""
        total = 0.0
        for rank in self.ranks.values():
            (samples, _), (seconds, _) = _gain(rank, "samples"), _gain(rank, "stepping_seconds")
            if not samples or not seconds:
                return None
            total += samples / seconds
        return total


def mean(values: Sequence[float]) -> float:
    """Their arithmetic mean."""
    return sum(values) / len(values)


def root_mean_square(values: Sequence[float]) -> float:
    """The root of the mean of their squares."""
    return math.sqrt(mean([v * v for v in values]))


def read_run(path: Path, name: str | None = None) -> Run:
    """Read the directory of a run, or its folder of records.

    Args:
        path: A run directory.
        name: What to call it; its own name by default.

    Raises:
        NoRunError: if no rank's file can be read.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    ranks: dict[int, Rank] = {}
    problems: list[str] = []
    if not folder.is_dir():
        raise NoRunError(f"{path}: there is no such directory")
    files = sorted(folder.glob(file_name(0).replace("0", "*")), key=lambda p: (len(p.name), p.name))
    for file in files:
        try:
            rank = _read_rank(file, problems)
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{file} cannot be read: {error}")
            continue
        if rank is not None:
            ranks[int(rank.about["rank"])] = rank
    if not ranks:
        detail = f" ({'; '.join(problems)})" if problems else ""
        raise NoRunError(f"{path}: no record of a rank in {folder / file_name(0).replace('0', '*')}{detail}")
    ranks = dict(sorted(ranks.items()))
    run = Run(name or path.resolve().name, path, ranks, problems)
    missing = [folder / file_name(r) for r in range(int(run.about["world_size"])) if r not in ranks]
    problems += [f"{file} is missing or has no complete start: that rank is in no mean" for file in missing]
    return run


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read several; returns those that hold anything, and everything that was wrong."""
    runs: list[Run] = []
    problems: list[str] = []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        try:
            runs.append(read_run(path, name))
        except NoRunError as error:
            problems.append(str(error))
    return runs, problems + [problem for run in runs for problem in run.problems]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max((len(p) for p in parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return ["/".join(p) for p in parts]


def _read_rank(file: Path, problems: list[str]) -> Rank | None:
    rank: Rank | None = None
    offsets: Record = {}
    seen = 0.0
    broken = 0
    for line in file.read_bytes().splitlines():
        if not line.strip():
            continue
        record = _parsed(line)
        if record is None or (rank is None and record["kind"] != "start"):
            broken += 1
        elif record["kind"] == "start":
            if record.get("format") != FORMAT:
                problems.append(f"{file} has format {record.get('format')!r}; this version reads {FORMAT}")
                return None
            rank, offsets = _go_on(rank, record, seen)
        elif rank is not None:
            record = _shifted(record, offsets)
            seen = float(record["seconds"])
            if record["kind"] == "step":
                rank.steps.append(record)
            elif record["kind"] == "validation":
                rank.validations.append(record)
            rank.ended = record["kind"] == "end"
    if broken:
        problems.append(f"{file}: {broken} of its lines cannot be read and are left out")
    return rank


def _parsed(line: bytes) -> Record | None:
    """A record with what every record has, or `None`."""
    try:
        record = json.loads(line)
        usable = isinstance(record["kind"], str) and math.isfinite(record["step"] + record["seconds"])
        if record["kind"] == "start":
            usable = usable and record["rank"] < record["world_size"] and record["strategy"] is not None
    except (ValueError, KeyError, TypeError):
        return None
    return record if usable else None


def _go_on(rank: Rank | None, start: Record, seen: float) -> tuple[Rank, Record]:
    """The rank as of a start, and what its totals have to be raised by from there on."""
    if rank is None or start["step"] == 0:
        return Rank(start, [start]), {}
    kept = [r for r in rank.steps if r["step"] <= start["step"]] or [start]
    validations = [r for r in rank.validations if r["step"] <= start["step"]]
    last = kept[-1]
    offsets = {name: last.get(name) or 0 for name in _AFRESH} | {"seconds": seen}
    offsets |= {name: last.get(name) or 0 for name in (*_CARRIED, *_TIMES) if start.get(name) is None}
    return Rank(rank.about, kept, validations), offsets


def _shifted(record: Record, offsets: Record) -> Record:
    return record | {name: record[name] + more for name, more in offsets.items() if record.get(name) is not None}


def _gain(rank: Rank, name: str) -> tuple[float | None, int]:
    """What a total has gained, and in how many steps."""
    first = rank.steps[1] if len(rank.steps) > 3 else rank.steps[0]
    last = rank.steps[-1]
    steps = int(last["step"] - first["step"])
    if steps < 1 or last.get(name) is None:
        return None, 1
    return float(last[name]) - float(first.get(name) or 0), steps
