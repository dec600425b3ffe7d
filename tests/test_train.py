"""The Hydra entry: what a run leaves behind, who starts its ranks, and how it says no."""

import json
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sync import train as entry
from lightning_sync.cli import main as cli_main
from lightning_sync.entry.errors import UsageError
from lightning_sync.entry.ranks import Ranks, find_ranks
from lightning_sync.entry.run_dir import MARK, agree_on_run_dir, open_run_dir
from lightning_sync.monitor.summary import write_summary
from tests.conftest import Command

KEYS = [
    *("strategy", "compressor", "aggregator", "precision", "world_size", "steps"),
    *("train_loss", "val_loss", "val_accuracy", "wire_bytes_per_step", "compression_ratio"),
    *("skipped_steps", "exchanges", "wall_seconds", "wait_seconds", "asynchronous", "versions"),
]


def summary_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


# ---- whole runs, two processes ---------------------------------------------------------------------------------------


@pytest.mark.dist
def test_a_run_leaves_a_summary_checkpoints_and_logs(train: Command, tmp_path: Path) -> None:
    # A value with blanks, an equals sign and quotes must reach the second process as it is.
    done = train("strategy=ddp", "trainer.max_epochs=1", "run_dir='out/it''s \"a=b\" c'".replace("''", "\\'"))
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name == 'it\'s "a=b" c'
    summary = summary_in(folder)
    assert list(summary) == KEYS
    assert (summary["strategy"], summary["compressor"], summary["aggregator"]) == ("DDPStrategy", "none", "mean")
    assert (summary["world_size"], summary["steps"], summary["precision"]) == (2, 22, "32-true")
    assert summary["val_accuracy"] > 0.3
    assert summary["wire_bytes_per_step"] is summary["compression_ratio"] is summary["wait_seconds"] is None
    assert summary["versions"]["lightning"] == "2.6.6"
    left = {path.name for path in folder.iterdir()}
    assert left == {"summary.json", "config.yaml", "checkpoints", "csv", "telemetry"}
    assert {path.name for path in (folder / "telemetry").iterdir()} == {"rank-0.jsonl", "rank-1.jsonl"}
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert "val_loss" in (folder / "csv" / "version_0" / "metrics.csv").read_text()
    assert "world_size" in done.stdout


@pytest.mark.dist
def test_a_compressed_run_counts_its_bytes_and_all_ranks_share_one_folder(train: Command, tmp_path: Path) -> None:
    done = train("strategy=strict", "compressor=int8", "trainer.max_steps=6")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name)
    summary = summary_in(folder)
    assert (summary["strategy"], summary["compressor"], summary["steps"]) == ("strict", "int8", 6)
    assert summary["compression_ratio"] > 2
    assert summary["wire_bytes_per_step"] > 0
    assert summary["wait_seconds"] >= 0
    assert summary["val_loss"] > 0  # six steps end in the middle of an epoch, and are validated all the same


@pytest.mark.dist
def test_an_asynchronous_run_reports_staleness_and_clock_lead_apart(train: Command, tmp_path: Path) -> None:
    done = train("strategy=ssp", "compressor=int8", "run_dir=run", "trainer.max_steps=8")
    assert done.returncode == 0, done.stderr
    summary = summary_in(tmp_path / "run")
    found = summary["asynchronous"]
    assert found.keys() == {
        *(f"{what}_{of}" for what in ("staleness", "clock_lead") for of in ("mean", "p95", "max")),
        *("achieved_period", "coalesced", "rejected"),
    }
    assert 0 <= found["staleness_mean"] <= found["staleness_max"]
    assert found["achieved_period"] == pytest.approx(1, abs=0.2), "a bound waits, and puts nothing together"
    assert found["rejected"] == 0
    assert (summary["strategy"], summary["steps"]) == ("asynchronous", 8)
    assert summary["wire_bytes_per_step"] > 0


@pytest.mark.dist
def test_resume_goes_on_where_the_checkpoint_is(train: Command, tmp_path: Path) -> None:
    assert train("strategy=ddp", "run_dir=run", "trainer.max_steps=4").returncode == 0
    again = ("strategy=ddp", "run_dir=run", "ckpt_path=run/checkpoints/last.ckpt")
    done = train(*again, "trainer.max_steps=4")
    assert done.returncode != 0
    assert "is at step 4 already" in done.stderr
    assert done.stderr.count("is at step 4 already") == 1
    assert summary_in(tmp_path / "run")["steps"] == 4
    assert not (tmp_path / "run" / MARK).exists()
    done = train(*again, "trainer.max_steps=9")
    assert done.returncode == 0, done.stderr
    assert summary_in(tmp_path / "run")["steps"] == 9
    assert json.loads((tmp_path / "run" / "summary.previous.json").read_text())["steps"] == 4
    assert not (tmp_path / "run" / MARK).exists()


@pytest.mark.dist
def test_a_failed_run_cannot_be_taken_for_a_finished_one(train: Command, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from lightning_sync.examples.digits_cnn import DigitsCNN\n"
        "class Broken(DigitsCNN):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        if batch_idx == 3:\n"
        "            raise RuntimeError('no fourth batch')\n"
        "        return super().training_step(batch, batch_idx)\n"
    )
    done = train("strategy=strict", "model._target_=broken.Broken", "run_dir=run", "trainer.max_steps=9")
    assert done.returncode != 0
    assert "no fourth batch" in done.stderr
    assert (tmp_path / "run" / MARK).exists()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.dist
def test_a_run_that_never_began_leaves_no_folder(train: Command, tmp_path: Path) -> None:
    done = train("strategy=ddp", "run_dir=run", "trainer.val_check_interval=5000", "trainer.max_steps=9")
    assert done.returncode != 0
    assert done.stderr.count("error:") == 1
    assert "val_check_interval" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.dist
def test_torchruns_ranks_are_used_and_agree_on_a_folder(command: Command, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    options = ("strategy=ddp", "experiment=digits", "trainer.max_steps=3", "trainer.enable_progress_bar=false")
    done = command(*launcher, "-m", "lightning_sync.train", *options)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert summary_in(folder)["world_size"] == 2


@pytest.mark.dist
def test_the_console_command_starts_its_ranks_too(command: Command, tmp_path: Path) -> None:
    options = ("strategy=ddp", "experiment=digits", "trainer.max_steps=3", "trainer.enable_progress_bar=false")
    done = command("-m", "lightning_sync.cli", "train", *options, "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert summary_in(tmp_path / "run")["world_size"] == 2


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compressor=zip"], "compressor=zip is unknown; accepted: acp, bf16, dgc, fp16, fp8, int4, int8, none, "),
        (["compressor=null"], "must be a string"),
        (["nosuch=1"], "nosuch=1 is unknown; accepted: strategy, compressor,"),
        (["trainer.max_stepz=1"], "trainer.max_stepz=1 is unknown; accepted in trainer: "),
        (
            ["compressor=int8", "compressor.blok=3"],
            "compressor.blok=3 is unknown; accepted in compressor: block, stochastic ",
        ),
        (["trainer.max_steps=ten"], "trainer.max_steps=ten: accepted: a whole number from 1, -1"),
        (["trainer.max_steps=0"], "trainer.max_steps=0: accepted: a whole number from 1, -1 for no limit, or null."),
        (["trainer.max_epochs=0"], "trainer.max_epochs=0: accepted: a whole number from 1"),
        (["model.lr=abc"], "model: lr=abc must be a finite number above 0."),
        (["experiment=digits", "model.lr=abc"], "model: lr=abc must be a finite number above 0."),
        (["data.batch_size=abc"], "data: batch_size=abc must be a whole number of at least 1."),
        (["seed=-1"], "seed=-1: accepted: a whole number from 0, or null."),
        (["run_dir=7"], "run_dir=7: accepted: a path or null."),
        (["ckpt_path=missing.ckpt"], "ckpt_path=missing.ckpt: there is no such file"),
        (["trainer.devices=0"], "trainer.devices=0: accepted:"),
        (["trainer.accelerator=cpu", "trainer.devices=two"], "trainer.devices=two: accepted:"),
        (["trainer.num_nodes=0"], "trainer.num_nodes=0: accepted:"),
        (["trainer.num_nodes=2"], "run_dir is not given and trainer.num_nodes=2"),
        (["trainer.accelerator=tpu9"], "accelerator='tpu9'"),
        (["strategy=ddp", "compressor=int8"], "compressor=int8: strategy=ddp takes no compressor"),
        (["compressor=int8", "strategy.compressor=bf16"], "compressor=int8 is given beside strategy.compressor=bf16"),
        (["compressor=int8", "compressor.block=-1"], "block=-1"),
        (["model.heads=3"], "model: heads=3 must divide width=128."),
        pytest.param(
            ["logger=wandb"], "wandb", marks=pytest.mark.skipif(find_spec("wandb") is not None, reason="is there")
        ),
        (["-m", "seed=1,2"], "multirun (-m) with 2 ranks"),
    ],
)
def test_wrong_arguments_end_with_one_sentence(
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clean_env: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        entry.main()
    message = str(exit_.value)
    assert message.startswith("error: ")
    assert expected in message
    assert "\n" not in message
    assert not list(tmp_path.rglob("summary.json"))
    assert not [path for path in tmp_path.rglob("*") if path.name != "multirun.yaml" and path != tmp_path / "runs"]


def in_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    """Run the entry on the digits in this process, in `folder`."""
    common = ("experiment=digits", "trainer.devices=1", "strategy=ddp", "trainer.enable_progress_bar=false")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", *common, "trainer.max_steps=2", *overrides])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        entry.main()
    finally:
        # Lightning's ddp leaves its group to the end of the process, which here runs other tests too.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_failed_start_leaves_a_finished_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_env: None
) -> None:
    folder = tmp_path / "run"
    write_summary(folder, {"steps": 1})
    (folder / "config.yaml").write_text("seed: 7\n")
    for _ in range(2):
        with pytest.raises(SystemExit, match="val_check_interval"):
            in_one_process(tmp_path, monkeypatch, "run_dir=run", "trainer.val_check_interval=5000")
    assert summary_in(folder) == {"steps": 1}
    assert (folder / "config.yaml").read_text() == "seed: 7\n"
    assert not (folder / MARK).exists()
    assert not list(folder.glob("summary.previous*"))


def test_a_run_without_batches_says_so_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_env: None
) -> None:
    with pytest.raises(SystemExit, match=r"no training batches with trainer\.limit_train_batches=0 "):
        in_one_process(tmp_path, monkeypatch, "run_dir=run", "trainer.limit_train_batches=0")
    assert not (tmp_path / "run").exists()


def test_a_run_stopped_by_sigterm_ends_with_143_and_stays_unfinished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_env: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("lightning_sync.entry.callbacks.ValidateAtEnd.on_train_batch_end", stop)
    with pytest.raises(SystemExit) as exit_:
        in_one_process(tmp_path, monkeypatch, "run_dir=run")
    assert exit_.value.code == 143
    assert capsys.readouterr().err.count("stopped by SIGTERM at step 1;") == 1
    assert (tmp_path / "run" / MARK).exists()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("argument", "expected"), [("trainer.max_steps=0", 1), ("ckpt_path=missing", "rank 1: error: ckpt_path=missing: ")]
)
def test_what_all_ranks_find_is_said_by_rank_0_only(
    argument: str, expected: int | str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_env: None
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as exit_:
        in_one_process(tmp_path, monkeypatch, argument)
    code = exit_.value.code
    assert code == expected if isinstance(expected, int) else str(code).startswith(expected)


@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_no_gpu_is_said_so(accelerator: str, monkeypatch: pytest.MonkeyPatch, clean_env: None) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=f"trainer.accelerator={accelerator}: torch sees no CUDA device"):
        find_ranks(accelerator, "auto", "auto")


def test_the_console_command_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli_main(["bake"])
    assert exit_.value.code != 0
    assert "train" in capsys.readouterr().err


def test_inspect_prints_what_is_beside_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_sync.compressors import BlockInt8, ErrorFeedback, as_route
    from tests.checkpoint.files import rank_states, reducers, save

    checkpoint = tmp_path / "last.ckpt"
    save(checkpoint, rank_states(reducers(as_route(ErrorFeedback(BlockInt8())), (0, 0))))
    cli_main(["inspect", str(checkpoint)])
    assert "ranks       2" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        cli_main(["inspect", str(tmp_path / "none.ckpt")])
    assert exit_.value.code == 1
    assert "holds no complete save" in capsys.readouterr().err


# ---- who starts the ranks, and where they write ----------------------------------------------------------------------


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch, clean_env: None) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_without_a_gpu_two_processes_are_started(no_cuda: None) -> None:
    ranks = find_ranks("auto", "auto", "auto")
    assert ranks == Ranks("self", "cpu", 2, 1)
    assert ranks.relaunches


def test_all_gpus_are_used(monkeypatch: pytest.MonkeyPatch, clean_env: None) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert find_ranks("auto", "auto", "auto") == Ranks("self", "cuda", 8, 1)
    assert find_ranks("gpu", -1, 2).count == 16
    assert find_ranks("gpu", [0, 3], "auto").count == 2


def test_srun_has_started_the_ranks(no_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = {"NTASKS": "8", "NNODES": "2", "JOB_ID": "41", "STEP_ID": "3", "JOB_NAME": "train", "PROCID": "5"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    ranks = find_ranks("auto", "auto", "auto")
    assert ranks == Ranks("slurm", "cpu", 4, 2)
    assert not ranks.relaunches
    assert agree_on_run_dir(None, tmp_path, ranks) == tmp_path / "runs" / "slurm-41.3"


def test_a_given_folder_counts_from_where_the_command_was_given(tmp_path: Path) -> None:
    assert agree_on_run_dir("a/b", tmp_path, Ranks("self", "cpu", 2, 1)) == tmp_path / "a" / "b"


def test_an_earlier_summary_is_kept_aside(tmp_path: Path) -> None:
    write_summary(tmp_path, {"steps": 1})
    open_run_dir(tmp_path, "seed: 0\n")
    assert not (tmp_path / "summary.json").exists()
    assert json.loads((tmp_path / "summary.previous.json").read_text()) == {"steps": 1}
    assert (tmp_path / MARK).exists()
    write_summary(tmp_path, {"steps": 2})
    open_run_dir(tmp_path, "seed: 0\n")
    assert json.loads((tmp_path / "summary.previous.json").read_text()) == {"steps": 1}
    assert json.loads((tmp_path / "summary.previous-2.json").read_text()) == {"steps": 2}


def test_a_summary_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_summary(tmp_path, {"steps": 1, "bad": object()})
    assert not (tmp_path / "summary.json").exists()
