"""`SyncMonitor` in whole fits: what is logged, what is written, and that neither changes training."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_sync as ls
from lightning_sync.monitor.callback import per_step
from lightning_sync.monitor.records import Recorder
from lightning_sync.monitor.trace import TraceProfiler
from tests.comm.census import census
from tests.models import Toy, everything, fit
from tests.workers import launch_ranks, run_ranks


def records(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


class Kept(CSVLogger):
    """Keeps what it is given."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.given: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.given.append({**metrics, "step": step})


def monitored(rank: int, world: int, folder: str, name: str, options: dict[str, Any], with_it: bool = True) -> Any:
    torch.manual_seed(3)
    module, logger = Toy(), Kept(folder)
    callbacks = [ls.SyncMonitor(Path(folder) / "telemetry", every_n_steps=4)] if with_it else []
    with census() as calls:
        fit(module, ls.strategy(name, **options), world, callbacks=callbacks, logger=logger)
    logged = [m for m in logger.given if any(k.startswith("sync/") for k in m)]
    return logged, everything(module), sorted((call.name, call.numel) for call in calls)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("strict", {"compressor": "int8"}, {"residual_norm"}),
        ("delayed", {"compressor": "int4"}, {"residual_norm", "staleness"}),
        (
            "diloco",
            {"compressor": "int8", "sync_every": 2, "warmup_steps": 2},
            {"residual_norm", "period", "consensus_distance"},
        ),
    ],
)
def test_every_mode_tells_what_it_costs_and_what_it_knows(
    name: str, options: dict[str, Any], told: set[str], tmp_path: Path
) -> None:
    logged, _, _ = run_ranks(monitored, 2, str(tmp_path), name, options, init="env")[0]
    assert [m["step"] for m in logged] == [4, 8, 12]
    last = logged[-1]
    assert {f"sync/{n}" for n in told} <= set(last)
    seconds = ("wait_seconds", "encode_seconds", "wire_seconds", "decode_seconds", "overlapped_seconds", "step_seconds")
    assert all(last[f"sync/{n}"] >= 0 for n in seconds)
    assert last["sync/wire_mb_per_step"] > 0
    assert 0 <= last["sync/wait_share"] <= 1
    assert last["sync/samples_per_second"] > 0
    for rank in range(2):
        found = records(tmp_path / "telemetry", rank)
        assert [r["kind"] for r in found] == ["start", "step", "step", "step", "end"]
        assert (found[0]["rank"], found[0]["world_size"], found[0]["strategy"]) == (
            rank,
            2,
            name.replace("diloco", "hybrid"),
        )
        assert found[3]["samples"] == 12 * 4
        assert math.isfinite(found[3]["loss"])
        assert told <= set(found[3])


def test_asynchronous_ranks_tell_how_far_apart_they_are(tmp_path: Path) -> None:
    run_ranks(monitored, 2, str(tmp_path), "async", {"sync_every": 2}, init="env")
    for rank in range(2):
        last = [r for r in records(tmp_path / "telemetry", rank) if r["kind"] == "step"][-1]
        assert last["staleness"] >= 0
        assert last["clock_lead"] >= 0
        assert last["period"] >= 1


def test_bytes_are_those_that_were_counted_and_only_rank_0_logs(tmp_path: Path) -> None:
    options = {"compressor": "bf16"}
    (logged, _, _), (other, _, _) = run_ranks(monitored, 2, str(tmp_path), "strict", options, init="env")
    assert not other
    last = records(tmp_path / "telemetry")[-1]
    parameters = sum(p.numel() for p in Toy().parameters() if p.requires_grad)
    assert last["sent_bytes"] >= 12 * 2 * parameters  # a ring of two sends as much as there is
    assert last["dense_bytes"] == 12 * 4 * parameters
    logged_bytes = sum(m["sync/wire_mb_per_step"] * 4 for m in logged) * 1e6
    assert logged_bytes == pytest.approx(last["sent_bytes"])


@pytest.mark.parametrize("name", ["strict", "diloco"])
def test_watching_changes_not_one_bit_of_training_and_sends_nothing(name: str, tmp_path: Path) -> None:
    options = {"compressor": "int8"} | ({"sync_every": 2, "warmup_steps": 2} if name == "diloco" else {})
    with_it, without = (
        run_ranks(monitored, 2, str(tmp_path), name, options, watched, init="env") for watched in (True, False)
    )
    for (_, mine, calls), (nothing, plain, plain_calls) in zip(with_it, without, strict=True):
        assert all(torch.equal(mine[k], plain[k]) for k in plain)
        assert calls == plain_calls
        assert calls
        assert not nothing


def stock(rank: int, world: int, folder: str) -> set[str]:
    logger = Kept(folder)
    callbacks = [ls.SyncMonitor(folder, every_n_steps=4)]
    fit(Toy(), "ddp", world, callbacks=callbacks, logger=logger)
    return {name for m in logger.given for name in m}


def test_under_lightnings_own_strategies_it_logs_what_there_is(tmp_path: Path) -> None:
    names, _ = run_ranks(stock, 2, str(tmp_path), init="env")
    assert {n for n in names if n.startswith("sync/")} == {"sync/step_seconds", "sync/samples_per_second"}


class Killed(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 9 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, world: int, folder: str) -> None:
    fit(Toy(), ls.strategy("strict", compressor="int8"), world, callbacks=[ls.SyncMonitor(folder, 2), Killed()])


def test_a_killed_rank_keeps_what_it_has_written(tmp_path: Path) -> None:
    outcomes = launch_ranks(killed, 2, str(tmp_path), init="env")
    assert outcomes[1].exit_code == -signal.SIGKILL
    found = records(tmp_path, 1)
    assert [r["step"] for r in found] == [0, 2, 4, 6, 8]
    assert found[-1]["kind"] == "step"


def traced(rank: int, world: int, folder: str, name: str) -> None:
    strategy = ls.strategy(name, compressor="int8")
    fit(Toy(), strategy, world, profiler=TraceProfiler(folder))


@pytest.mark.parametrize("name", ["strict", "delayed"])
def test_a_trace_per_rank_shows_every_phase(name: str, tmp_path: Path) -> None:
    run_ranks(traced, 2, str(tmp_path), name, init="env")
    for rank in range(2):
        (path,) = [p for p in tmp_path.glob("*.pt.trace.json") if f"-{rank}" in p.name.split(".")[0]]
        spans = [
            e for e in json.loads(path.read_text())["traceEvents"] if e.get("name", "").startswith("lightning_sync::")
        ]
        threads = {e["name"].split("::")[1]: e["tid"] for e in spans}
        assert set(threads) >= {"encode", "wire", "decode", "wait"}
        assert threads["wait"] != threads["encode"] == threads["decode"]
        assert all(e["dur"] >= 0 for e in spans)


def test_means_per_step_are_differences_of_totals() -> None:
    before = {"step": 10, "stepping_seconds": 1.0, "samples": 40, "sent_bytes": 10**6, "dense_bytes": 4 * 10**6}
    before |= {"wait_seconds": 0.5, "encode_seconds": 0.1, "wire_seconds": 0.6, "decode_seconds": 0.1, "exchanges": 0}
    after = {"step": 20, "stepping_seconds": 3.0, "samples": 80, "sent_bytes": 6 * 10**6, "dense_bytes": 24 * 10**6}
    after |= {"wait_seconds": 1.0, "encode_seconds": 0.3, "wire_seconds": 1.4, "decode_seconds": 0.2, "exchanges": 0}
    found = per_step(before, after, ranks=3)
    expected = {"step_seconds": 0.2, "wire_mb_per_step": 0.5, "compression_ratio": 4.0, "wait_seconds": 0.05}
    expected |= {"encode_seconds": 0.02, "wire_seconds": 0.08, "decode_seconds": 0.01, "wait_share": 0.25}
    assert found == pytest.approx({**expected, "overlapped_seconds": 0.06, "samples_per_second": 60.0})


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    recorder.write("step", {"loss": float("nan")})
    recorder.close()
    assert records(tmp_path) == [{"kind": "step", "loss": None}]


def test_records_that_cannot_be_written_do_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file", 0)
    recorder.write("step", {"step": 1})
    recorder.close()
    assert "Training goes on without it" in caplog.text


def test_a_period_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0"):
        ls.SyncMonitor(every_n_steps=0)
