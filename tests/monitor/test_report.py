"""The report shows what there is, names what is missing, and needs nothing but itself."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from lightning_sync.monitor.figures import draw_all
from lightning_sync.monitor.report import main
from lightning_sync.monitor.runs import NoRunError, distinct_names, read_run

GAUGES = {"residual_norm": 0.5, "consensus_distance": 1.5, "period": 8.0, "staleness": 1.0}


def start(rank: int = 0, world: int = 2, step: int = 0, **more: Any) -> dict[str, Any]:
    about = {"kind": "start", "format": 1, "rank": rank, "world_size": world, "strategy": "hybrid"}
    return {**about, "compressor": "int8", "step": step, "seconds": 0.0, "samples": 0, "stepping_seconds": 0.0, **more}


def step(number: int, rank: int = 0, since: int = 0, **more: Any) -> dict[str, Any]:
    own = number - since
    times = {"wait_seconds": 0.02, "encode_seconds": 0.01, "wire_seconds": 0.03, "decode_seconds": 0.005}
    totals = {"seconds": 0.1 * own, "stepping_seconds": 0.1 * own, "samples": 4 * own}
    counted = {"sent_bytes": 10**6 * number, "dense_bytes": 4 * 10**6 * number, "network_bytes": 0}
    counted |= {name: value * number for name, value in times.items()}
    return {"kind": "step", "step": number, "loss": 2.0 / number + rank, **totals, **counted, **more}


def write(folder: Path, rank: int, *records: dict[str, Any] | str) -> None:
    (folder / "telemetry").mkdir(parents=True, exist_ok=True)
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    (folder / "telemetry" / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "diloco"
    for rank in range(2):
        steps = [step(n, rank, **GAUGES) for n in (10, 20, 30, 40)]
        ends = {"kind": "end", "step": 40, "seconds": 4.1}
        validation = {"kind": "validation", "step": 25, "seconds": 2.4, "val_loss": 0.7}
        write(path, rank, start(rank), *steps[:2], validation, *steps[2:], ends)
    return path


def test_totals_become_means_per_step_and_rank(run: Path) -> None:
    found = read_run(run)
    assert found.ended
    assert found.problems == []
    assert found.per_step("stepping_seconds") == pytest.approx(0.1)
    assert found.per_step("sent_bytes") == pytest.approx(1e6)
    assert found.per_step("wait_seconds") == pytest.approx(0.02)
    assert found.samples_per_second() == pytest.approx(2 * 4 / 0.1)
    assert found.series("loss") == pytest.approx({10: 0.7, 20: 0.6, 30: 2 / 30 + 0.5, 40: 0.55})
    assert found.validation() == {25: 0.7}


def test_a_resume_goes_on_and_repeated_steps_stand_once(tmp_path: Path) -> None:
    first = [start(world=1), step(10), step(20), step(30)]
    resumed = [start(world=1, step=20, sent_bytes=2 * 10**7), step(30, since=20, loss=5.0), step(40, since=20)]
    write(tmp_path, 0, *first, *resumed)
    found = read_run(tmp_path)
    assert not found.ended
    assert found.series("loss")[30] == 5.0
    assert list(found.series("sent_bytes").values()) == [1e7, 2e7, 3e7, 4e7]
    assert found.series("samples")[40] == 4 * 40
    assert found.series("seconds")[40] == pytest.approx(3.0 + 2.0)  # lost work took its time, too
    assert found.samples_per_second() == pytest.approx(40)


def test_another_run_in_the_same_place_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 0, start(world=1), step(10), step(20), start(world=1), step(5))
    assert list(read_run(tmp_path).series("loss")) == [5]


def test_the_page_stands_alone_and_every_figure_is_a_png_too(run: Path, tmp_path: Path) -> None:
    assert main([str(run), "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "<script" not in page
    assert "@import" not in page
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    titles = {"Loss against steps", "Loss against wall time", "Loss against bytes sent", "Bytes on the wire"}
    titles |= {"Where a step&#x27;s time goes", "Residual norm", "Consensus distance", "Staleness and clock lead"}
    assert titles <= set(re.findall(r"<figure><h2>(.*?)</h2>", page))
    for image in images:
        root = ET.fromstring(base64.b64decode(image))
        assert root.get("viewBox")
    pictures = list((tmp_path / "out").glob("*.png"))
    assert len(pictures) == len(images) == 9
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    for cell in ("hybrid", "int8", "20 %", "80", "0.7"):
        assert f"<td>{cell}</td>" in page, cell


def test_axes_have_units(run: Path) -> None:
    pictures, absent = draw_all([read_run(run)])
    assert absent == []
    for picture in pictures:
        (axes,) = picture.figure.axes
        assert axes.get_xlabel(), picture.key
    labels = {p.key: p.figure.axes[0].get_xlabel() for p in pictures}
    assert labels["loss_time"].endswith("(s)")
    assert labels["loss_bytes"].endswith("(MB)")
    assert labels["time_per_step"].endswith("(ms)")


def test_what_is_missing_or_broken_is_named_and_the_rest_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "telemetry" / "rank-1.jsonl").unlink()
    half = tmp_path / "half"
    write(half, 0, start(world=1), step(10), step(20), '{"kind": "step", "st')
    none = tmp_path / "none"
    none.mkdir()
    gone = tmp_path / "gone"
    assert main([*map(str, (run, half, none, gone)), "-o", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    said = capsys.readouterr().err
    for text in (
        "rank-1.jsonl is missing",
        "1 of its lines cannot be read",
        f"{none}: no record",
        f"{gone}: there is no",
    ):
        assert text in said
        assert text in page
    assert "20 (not finished)" in page
    assert "40 (not finished)" in page


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "null",
        "3",
        '{"kind": "start"}',
        '{"kind": "step", "step": 1, "seconds": 1}',
        "\x00\xff",
        '{"kind": 1}',
    ],
)
def test_a_file_without_a_start_is_no_run(line: str, tmp_path: Path) -> None:
    write(tmp_path, 0, line)
    with pytest.raises(NoRunError, match="no record of a rank"):
        read_run(tmp_path)


def test_nothing_to_show_is_an_error_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "gone"), "-o", str(tmp_path / "out")]) == 1
    assert "SyncMonitor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_counters_is_shown_without_bytes(tmp_path: Path) -> None:
    own = ("kind", "step", "seconds", "stepping_seconds", "samples", "loss")
    write(tmp_path, 0, start(world=1), *({k: step(n)[k] for k in own} for n in (10, 20)))
    pictures, absent = draw_all([read_run(tmp_path)])
    assert {p.key for p in pictures} == {"loss_steps", "loss_time", "time_per_step"}
    assert "Bytes on the wire" in absent


def test_names_are_as_short_as_they_can_be_told_apart(tmp_path: Path) -> None:
    assert distinct_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert distinct_names([tmp_path / "x/run", tmp_path / "y/run"]) == ["x/run", "y/run"]


def test_names_cannot_break_the_page(run: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<b>&'"
    run.rename(odd)
    assert main([str(odd), "-o", str(tmp_path / "out")]) == 0
    assert "<b>" not in (tmp_path / "out" / "index.html").read_text()
