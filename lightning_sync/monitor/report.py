"""``lightning-sync report``: one page that shows what runs have learned, sent and waited for."""

from __future__ import annotations

import argparse
import base64
import io
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sync.monitor.runs import Run, read_runs

if TYPE_CHECKING:
    from lightning_sync.monitor.figures import Picture

PAGE = "index.html"
_DPI = 150
_EXAMPLE = """example:
  lightning-sync report runs/ddp runs/diloco -o report    # then open report/index.html in a browser
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its figures.

    Args:
        arguments: The command line without the program's name; None takes the process's own.

    Returns:
        0, or 1 if there was nothing to show.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-sync report",
        description="Write one HTML page, and its figures as PNG files, about one or several runs: losses, time, "
        "bytes. It is made from what SyncMonitor has written to RUN/telemetry, also if a run was killed.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run directory")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report"), help="directory of the page (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    runs, problems = read_runs(chosen.runs)
    for problem in problems:
        print(f"lightning-sync report: {problem}", file=sys.stderr)
    if not runs:
        print(
            "lightning-sync report: nothing to show. Give directories of runs with the callback SyncMonitor, which "
            "lightning_sync.train adds by itself.",
            file=sys.stderr,
        )
        return 1
    try:
        page = write_report(runs, chosen.output, problems)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        print("lightning-sync report needs matplotlib: pip install 'lightning-sync[report]'", file=sys.stderr)
        return 1
    print(page)
    return 0


def write_report(runs: Sequence[Run], folder: Path, problems: Sequence[str] = ()) -> Path:
    """Write ``index.html``, which needs no other file and no network, and every figure as a PNG beside it.

    Args:
        runs: At least one.
        folder: Made if it is missing; files of an earlier report are overwritten.
        problems: What could not be read; shown on the page.

    Returns:
        The page.
    """
    from lightning_sync.monitor.figures import draw_all  # matplotlib is an extra

    pictures, absent = draw_all(runs)
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for picture in pictures:
        picture.figure.savefig(folder / f"{picture.key}.png", dpi=_DPI)
        parts.append(_figure(picture))
    notes = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    warning = f'<section class="missing"><h2>Missing or broken</h2><ul>{notes}</ul></section>' if notes else ""
    rest = f'<p class="note">No run has numbers for: {escape(", ".join(absent).lower())}.</p>' if absent else ""
    names = ", ".join(run.name for run in runs)
    page = _PAGE.format(
        names=escape(names), warning=warning, table=_table(runs), figures="\n".join(parts), rest=rest, style=_STYLE
    )
    path = folder / PAGE
    path.write_text(page, encoding="utf-8")
    return path


def _figure(picture: Picture) -> str:
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    title, note = escape(picture.title), escape(picture.note)
    image = f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><h2>{title}</h2>{image}<figcaption>{note}</figcaption></figure>"


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = []
    for label, value in _ROWS.items():
        cells = [value(run) for run in runs]
        if any(cells):
            rows.append(
                f"<tr><th>{label}</th>" + "".join(f"<td>{escape(c) or '&ndash;'}</td>" for c in cells) + "</tr>"
            )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _last(series: dict[int, float]) -> float | None:
    return list(series.values())[-1] if series else None


def _number(value: float | None, digits: int = 4, factor: float = 1.0) -> str:
    if value is None:
        return ""
    value *= factor
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _ratio(run: Run) -> str:
    between_nodes = run.per_step("network_bytes")
    sent, dense = (
        (between_nodes, run.per_step("dense_network_bytes"))
        if between_nodes
        else (run.per_step("sent_bytes"), run.per_step("dense_bytes"))
    )
    return _number(dense / sent, 3) if sent and dense else ""


def _waiting(run: Run) -> str:
    wait, step = run.per_step("wait_seconds"), run.per_step("stepping_seconds")
    return "" if wait is None or not step else f"{100 * min(1.0, wait / step):.0f} %"


_ROWS: dict[str, Callable[[Run], str]] = {
    "strategy": lambda run: str(run.about["strategy"]),
    "compressor": lambda run: str(run.about.get("compressor", "")),
    "aggregator": lambda run: str(run.about.get("aggregator", "")),
    "precision": lambda run: str(run.about.get("precision", "")),
    "ranks": lambda run: str(run.about["world_size"]),
    "steps": lambda run: f"{run.last_step:,}" + ("" if run.ended else " (not finished)"),
    "training loss, last record": lambda run: _number(_last(run.series("loss"))),
    "val_loss, last": lambda run: _number(_last(run.validation())),
    "wall time (s)": lambda run: _number(_last(run.series("seconds")), 3),
    "time per step (ms)": lambda run: _number(run.per_step("stepping_seconds"), 3, 1000),
    "of it waiting": _waiting,
    "samples per second, all ranks": lambda run: _number(run.samples_per_second(), 3),
    "sent per rank and step (MB)": lambda run: _number(run.per_step("sent_bytes"), 3, 1e-6),
    "of it to other nodes (MB)": lambda run: _number(run.per_step("network_bytes") or None, 3, 1e-6),
    "sent per rank in all (MB)": lambda run: _number(_last(run.series("sent_bytes")), 3, 1e-6),
    "uncompressed bytes / sent bytes": _ratio,
    "exchanges": lambda run: _number(_last(run.series("exchanges")) or None),
    "steps skipped for inf or NaN": lambda run: _number(_last(run.series("skipped_steps")) or None),
}

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; padding: 16px;
       max-width: 1240px; }
h1 { font-size: 1.5rem; margin: 0 0 2px; } h2 { font-size: 1rem; margin: 0 0 6px; }
p { margin: 0 0 14px; overflow-wrap: anywhere; }
.table { overflow-x: auto; margin-bottom: 18px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; min-width: 50%; }
th, td { padding: 4px 10px 4px 0; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th { font-weight: 600; } tbody th { font-weight: 400; color: #555; }
th:first-child { text-align: left; min-width: 92px; } thead th { border-bottom: 2px solid #888; }
@media (max-width: 600px) { body { padding: 12px; } table { font-size: .74rem; } th, td { padding-right: 7px; } }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 20px; }
figure { margin: 0; break-inside: avoid; } img { display: block; width: 100%; height: auto; }
figcaption, .note { font-size: .82rem; color: #555; margin-top: 4px; }
.missing { border-left: 4px solid #D55E00; padding: 8px 12px; background: #fdf3ec; margin-bottom: 18px; }
.missing ul { margin: 0; padding-left: 18px; overflow-wrap: anywhere; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } .table { overflow: visible; }
  .figures { grid-template-columns: 1fr 1fr; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lightning_sync: {names}</title>
<style>{style}</style>
</head>
<body>
<h1>What synchronisation cost</h1>
<p>Runs: {names}. Means over the ranks; time and bytes per step leave out the first record, which holds start-up
costs.</p>
{warning}
<div class="table">{table}</div>
<div class="figures">
{figures}
</div>
{rest}
</body>
</html>
"""
