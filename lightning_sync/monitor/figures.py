"""The figures of a report, drawn with matplotlib from what runs have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_sync.monitor.runs import Run, root_mean_square

# Okabe and Ito's colours, which people who see fewer colours can tell apart; lines differ in print as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_PARTS = {
    "compute and all else": "#9DB4C0",
    "waiting": "#D55E00",
    "encode": "#56B4E9",
    "wire": "#E69F00",
    "decode": "#009E73",
}
_SIZE = (5.2, 3.6)
_MB = 1e6


@dataclass(frozen=True)
class Picture:
    """A figure with its words.

    Attributes:
        key: The name of its file, without extension.
        title: Stands above it.
        note: What it shows, below it.
        figure: What matplotlib drew.
    """

    key: str
    title: str
    note: str
    figure: Figure


def draw_all(runs: Sequence[Run]) -> tuple[list[Picture], list[str]]:
    """All figures for which any run has numbers, and the titles of the others."""
    found: list[Picture] = []
    absent: list[str] = []
    for title, draw in _FIGURES.items():
        picture = draw(title, runs)
        if picture is None:
            absent.append(title)
        else:
            found.append(picture)
    return found, absent


def _losses(
    key: str, label: str, unit: str, x_of: Callable[[Run], dict[int, float]], title: str, runs: Sequence[Run]
) -> Picture | None:
    figure, axes = _blank(label, "loss")
    drawn = False
    for index, run in enumerate(runs):
        x, train, validation = x_of(run), run.series("loss"), run.validation()
        points = [(x[step], value) for step, value in train.items() if step in x]
        if points:
            axes.plot(*zip(*points, strict=True), label=run.name, **_line(index))
            drawn = True
        marks = [(_between(x, step), value) for step, value in validation.items()]
        marks = [(place, value) for place, value in marks if place is not None]
        if marks:
            axes.plot(*zip(*marks, strict=True), "o", ms=4.5, color=_colour(index), mfc="white", mew=1.4)
    if not drawn:
        return None
    _legend(figure, axes, len(runs))
    note = (
        f"Lines: training loss, mean over the ranks and over the steps between two records. Circles: val_loss. {unit}"
    )
    return Picture(key, title, note.strip(), figure)


def _by_step(title: str, runs: Sequence[Run]) -> Picture | None:
    return _losses("loss_steps", "optimiser steps", "", _steps, title, runs)


def _by_time(title: str, runs: Sequence[Run]) -> Picture | None:
    unit = "Time runs from the first step and includes validation."
    return _losses("loss_time", "wall time (s)", unit, lambda run: run.series("seconds"), title, runs)


def _by_bytes(title: str, runs: Sequence[Run]) -> Picture | None:
    def sent(run: Run) -> dict[int, float]:
        return {step: value / _MB for step, value in run.series("sent_bytes").items()}

    return _losses("loss_bytes", "sent per rank (MB)", "1 MB is 10^6 bytes.", sent, title, runs)


def _time_per_step(title: str, runs: Sequence[Run]) -> Picture | None:
    figure, axes = _blank("time per step (ms)", "", grid="x")
    rows = [(run, run.per_step("stepping_seconds")) for run in runs]
    rows = [(run, step) for run, step in rows if step is not None]
    if not rows:
        return None
    named: set[str] = set()

    def stack(y: float, parts: dict[str, float]) -> None:
        left = 0.0
        for name, seconds in parts.items():
            label = None if name in named else name
            named.add(name)
            axes.barh(y, 1000 * seconds, 0.36, left=1000 * left, color=_PARTS[name], label=label, ec="white", lw=0.5)
            left += seconds

    for place, (run, step) in enumerate(rows):
        assert step is not None
        wait = run.per_step("wait_seconds")
        whole = {"compute and all else": step}
        if wait is not None:
            whole = {"compute and all else": max(0.0, step - wait), "waiting": min(wait, step)}
        stack(place - 0.2, whole)
        phases = {name: run.per_step(f"{name}_seconds") for name in ("encode", "wire", "decode")}
        stack(place + 0.2, {name: value for name, value in phases.items() if value is not None})
    axes.set_yticks(range(len(rows)), [_short(run.name, 16) for run, _ in rows])
    axes.invert_yaxis()
    _legend(figure, axes, 5)
    note = (
        "Upper bar: the training thread. Lower bar: reductions, on a thread of their own; what of it is not waiting is "
        "hidden behind compute. Means over the ranks. A run without a split (strict without a compressor) waits inside "
        "torch, where nobody can measure it."
    )
    return Picture("time_per_step", title, note, figure)


def _bytes_per_step(title: str, runs: Sequence[Run]) -> Picture | None:
    figure, axes = _blank("sent per rank and step (MB)", "", grid="x")
    rows = [(run, run.per_step("sent_bytes"), run.per_step("dense_bytes")) for run in runs]
    rows = [row for row in rows if row[1] is not None]
    if not rows:
        return None
    for place, (_, sent, dense) in enumerate(rows):
        assert sent is not None
        axes.barh(place, sent / _MB, 0.5, color=_colour(0), label="sent" if place == 0 else None)
        axes.text(max(sent, dense or 0) / _MB, place, f"  {_digits(sent / _MB)}", va="center", fontsize=8)
        if dense:
            axes.plot([dense / _MB] * 2, [place - 0.35, place + 0.35], color="#444444", lw=1.6)
    axes.plot([], [], color="#444444", lw=1.6, label="the same, uncompressed")
    axes.set_yticks(range(len(rows)), [_short(run.name, 16) for run, *_ in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    _legend(figure, axes, 2)
    note = "Counted where payloads are handed to collectives, times what a rank sends in each. 1 MB is 10^6 bytes."
    return Picture("bytes_per_step", title, note, figure)


def _gauge(
    key: str, label: str, note: str, over: Callable[[Sequence[float]], float] | None, names: Sequence[str]
) -> Callable[[str, Sequence[Run]], Picture | None]:
    def draw(title: str, runs: Sequence[Run]) -> Picture | None:
        figure, axes = _blank("optimiser steps", label)
        drawn = False
        for index, run in enumerate(runs):
            for dash, name in enumerate(names):
                series = run.series(name, over)
                if series:
                    what = run.name if len(names) == 1 else f"{run.name}: {name.replace('_', ' ')}"
                    style = _line(index) | ({"ls": _DASHES[dash]} if len(names) > 1 else {})
                    axes.plot(list(series), list(series.values()), label=what, **style)
                    drawn = True
        if not drawn:
            return None
        axes.set_ylim(bottom=0)
        _legend(figure, axes, len(runs) * len(names))
        return Picture(key, title, note, figure)

    return draw


_FIGURES: dict[str, Callable[[str, Sequence[Run]], Picture | None]] = {
    "Loss against steps": _by_step,
    "Loss against wall time": _by_time,
    "Loss against bytes sent": _by_bytes,
    "Where a step's time goes": _time_per_step,
    "Bytes on the wire": _bytes_per_step,
    "Staleness and clock lead": _gauge(
        "staleness",
        "exchanges or steps",
        "Staleness: how many versions lie between what an update was computed from and what it was applied to. Clock "
        "lead: exchanges by which a replica is ahead of the slowest. Means over the ranks.",
        None,
        ("staleness", "clock_lead"),
    ),
    "Residual norm": _gauge(
        "residual_norm",
        "2-norm, gradient or delta units",
        "What error feedback still owes, root mean square over the ranks. It should level off; if it grows, the "
        "compressor sends too little.",
        root_mean_square,
        ("residual_norm",),
    ),
    "Consensus distance": _gauge(
        "consensus_distance",
        "2-norm, parameter units",
        "How far replicas had gone from what all last agreed on when they met, root mean square over the ranks.",
        root_mean_square,
        ("consensus_distance",),
    ),
    "Steps between exchanges": _gauge(
        "period", "optimiser steps", "The period that was achieved, as of the last exchange.", None, ("period",)
    ),
}


def _blank(x: str, y: str, grid: str = "both") -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8.5, length=3, color="#888888")
    axes.grid(axis=grid, color="#E3E3E3", lw=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#888888")
    return figure, axes


def _legend(figure: Figure, axes: Axes, entries: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels))
    columns = max(1, min(entries, len(labels), 4 if longest < 9 else 3 if longest < 15 else 2))
    shown = [_short(label, 34) for label in labels]
    figure.legend(handles, shown, loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5, borderpad=0)


def _line(index: int) -> dict[str, Any]:
    return {"color": _colour(index), "ls": _DASHES[index % len(_DASHES)], "lw": 1.7}


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _steps(run: Run) -> dict[int, float]:
    return {step: float(step) for step in run.series("seconds")}


def _between(x: dict[int, float], step: int) -> float | None:
    """Where a step lies that need not have a record of its own: interpolated; at the end, where the last one is."""
    before = [s for s in x if s <= step]
    after = [s for s in x if s >= step]
    if not before:
        return None
    low = before[-1]
    high = after[0] if after else low
    share = 0.0 if high == low else (step - low) / (high - low)
    return x[low] + share * (x[high] - x[low])


def _short(text: str, limit: int) -> str:
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
