"""A job asks SLURM to start it again when it should, and only then; and it goes on from the newest whole checkpoint."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_sync as ls
from lightning_sync.checkpoint import SyncFolder
from lightning_sync.checkpoint.manifest import TAG
from lightning_sync.cluster import early, newest_checkpoint
from lightning_sync.cluster.requeue import is_preempted, is_to_requeue, requeue
from lightning_sync.cluster.slurm import Job, current_job
from lightning_sync.compressors import Route
from tests.checkpoint.files import rank_states, reducers
from tests.checkpoint.files import save as save_ranks


def job(**env: str) -> Job:
    found = current_job({"SLURM_JOB_ID": "41", **env})
    assert found is not None
    return found


class Scontrol:
    """Answers in turn, and remembers what it was asked."""

    def __init__(self, *answers: tuple[int, str] | type[Exception]) -> None:
        self.answers: list[Any] = list(answers)
        self.asked: list[list[str]] = []

    def __call__(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        self.asked.append(command)
        answer = self.answers.pop(0)
        if isinstance(answer, type):
            raise subprocess.TimeoutExpired(command, 1) if answer is TimeoutError else answer()
        code, text = answer
        return subprocess.CompletedProcess(command, code, text if code == 0 else "", "" if code == 0 else text)


def test_a_job_is_requeued_by_its_id_and_an_element_by_that_of_its_array() -> None:
    for mine, name in ((job(), "41"), (job(SLURM_ARRAY_JOB_ID="34", SLURM_ARRAY_TASK_ID="7"), "34_7")):
        scontrol = Scontrol((0, ""))
        assert requeue(mine, scontrol) is None
        assert scontrol.asked == [["scontrol", "requeue", name]]


def test_a_controller_that_does_not_answer_is_asked_again() -> None:
    scontrol = Scontrol(TimeoutError, (1, "Unable to contact slurm controller"), (0, ""))
    assert requeue(job(), scontrol, pause=0) is None
    assert len(scontrol.asked) == 3


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([FileNotFoundError], "scontrol is not on PATH"),
        ([(1, "Requested operation is presently disabled for job 41")], "sbatch --requeue"),
        ([(1, "busy")] * 4, "failed (busy)"),
    ],
)
def test_what_keeps_a_job_from_being_requeued_is_said_with_the_remedy(answers: list[Any], said: str) -> None:
    problem = requeue(job(), Scontrol(*answers), pause=0)
    assert problem is not None
    assert said in problem


@pytest.mark.parametrize(
    ("reason", "preempted", "wanted"),
    [
        ("SIGUSR1 on rank 1 (host gpu04)", "None", True),
        ("SIGTERM on rank 0 (host gpu03)", "None", False),
        ("SIGTERM on rank 0 (host gpu03)", "2026-12-01T13:00:00", True),
        ("a request on rank 0 (host gpu03)", "2026-12-01T13:00:00", False),
    ],
)
def test_a_cancelled_job_stays_away_and_a_preempted_one_comes_back(reason: str, preempted: str, wanted: bool) -> None:
    scontrol = Scontrol((0, f"JobId=41 PreemptEligibleTime=2026-12-01T12:00:00 PreemptTime={preempted} EndTime=x"))
    assert is_to_requeue(job(), reason, "SIGUSR1", scontrol) is wanted


def test_without_an_answer_a_job_does_not_count_as_preempted() -> None:
    assert not is_preempted(job(), Scontrol(FileNotFoundError))
    assert not is_preempted(job(), Scontrol((1, "PreemptTime=now")))


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
def test_a_signal_during_the_start_is_kept_until_training_begins() -> None:
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    early.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert early.take() == [signal.SIGUSR1]
    assert early.take() == []
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


# ---- what to go on from ----------------------------------------------------------------------------------------------


def save(path: Path, step: int, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step, "state_dict": {"w": torch.ones(1000)}, **more}, path)
    return path


def test_the_newest_is_the_one_with_the_most_steps_whatever_its_name(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "stopped-step=30.ckpt", 30)
    newest = save(tmp_path / "hpc_ckpt_1.ckpt", 50)
    save(tmp_path / "checkpoints" / "last.ckpt", 40)
    assert newest_checkpoint(tmp_path) == str(newest)


def test_where_there_is_none_a_run_begins_at_step_0(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "part of another write"])
def test_a_file_that_a_failing_node_left_half_written_is_passed_over(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = save(tmp_path / "step=10.ckpt", 10)
    broken = save(tmp_path / "last.ckpt", 20)
    content = broken.read_bytes()
    broken.write_bytes(
        {"cut": content[: len(content) // 2], "empty": b"", "text": b"x" * 100, "part of another write": content[:-30]}[
            damage
        ]
    )
    assert newest_checkpoint(tmp_path) == str(whole)
    assert "last.ckpt is passed over" in caplog.text


@pytest.mark.parametrize("damage", ["no folder", "a file is gone", "a file is cut", "another manifest"])
def test_a_checkpoint_whose_ranks_are_not_all_there_is_passed_over(damage: str, tmp_path: Path) -> None:
    whole = save(tmp_path / "step=10.ckpt", 10)
    path = tmp_path / "last.ckpt"
    states = rank_states(reducers(Route([("*", ls.BlockInt8())]), [0, 0]))
    manifest = save_ranks(path, states)
    save(path, 20, **{TAG: {"save": manifest.save, "checksum": manifest.checksum}})
    assert newest_checkpoint(tmp_path) == str(path)
    folder = SyncFolder(path).path / manifest.save
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage == "a file is gone":
        (folder / "rank-00001.pt").unlink()
    elif damage == "a file is cut":
        (folder / "rank-00001.pt").write_bytes((folder / "rank-00001.pt").read_bytes()[:-1])
    else:
        save(path, 20, **{TAG: {"save": manifest.save, "checksum": "0" * 64}})
    assert newest_checkpoint(tmp_path) == str(whole)
