"""The demo's parts; the whole of it is a slow test."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import make_wires
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors.base import Payload
from tests.workers import run_ranks

DEMO = Path(__file__).parents[1] / "recipes" / "demo"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


def send_over_a_slow_link(rank: int, world: int) -> tuple[float, float, float]:
    module("rank").throttle(8.0)  # 1 MB per second
    counters = Counters()
    wire = make_wires(Topology(rank, (0,) * world), counters).world
    tensor = torch.full((50_000,), float(rank))
    began = time.perf_counter()
    finishers = [wire.start([Payload("sum", (tensor,))]) for _ in range(2)]
    started = time.perf_counter() - began
    for finish in finishers:
        finish()
    took = time.perf_counter() - began
    dist.barrier()
    assert counters.wire_seconds is not None
    return started, took, counters.wire_seconds


def test_collectives_take_the_link_one_after_the_other_and_training_goes_on_meanwhile() -> None:
    for started, took, on_the_wire in run_ranks(send_over_a_slow_link, 2):
        assert started < 0.35
        assert 0.4 <= took < 3  # two times 200,000 bytes
        assert 0.04 < on_the_wire <= took


def test_the_throttle_is_nothing_that_the_package_knows_of() -> None:
    assert GroupWire.start.__module__ == "lightning_sync.comm.wire"


def test_a_lane_shows_the_last_whole_record(tmp_path: Path) -> None:
    race = module("race")
    lane = race.Lane("title", tmp_path, ())
    lane.look()
    assert lane.step == 0
    (tmp_path / "telemetry").mkdir()
    record = {"kind": "step", "step": 4, "seconds": 1.5, "loss": 2.0, "sent_bytes": 7}
    text = json.dumps(record) + "\n" + json.dumps({**record, "step": 6})[:20]
    (tmp_path / "telemetry" / "rank-0.jsonl").write_text(text)
    lane.look()
    assert (lane.step, lane.seconds, lane.loss, lane.sent) == (4, 1.5, 2.0, 7)


def test_bits_are_compared(tmp_path: Path) -> None:
    race = module("race")
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-23)):
        torch.save({"state_dict": {"w": torch.tensor([value])}}, tmp_path / name)
    assert race.same_bits(tmp_path / "a", tmp_path / "b")
    assert not race.same_bits(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("arguments", [["--mbit", "0"], ["--steps", "70"], ["--steps", "50"], ["--output", "."]])
def test_wrong_arguments_are_refused_at_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module("race").main(arguments)
    assert ended.value.code == 2
    assert f"{arguments[0]}={arguments[1]} " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path: Path) -> None:
    words = [sys.executable, str(DEMO / "race.py"), "--output", str(tmp_path / "out"), "--steps", "100"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits as the run nobody killed" in done.stdout
    assert (tmp_path / "out" / "report" / "index.html").exists()
