"""Jobs that are set up wrongly end at once and say why, also at the start of a run; sweeps go through submitit."""

import os
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable


def submit(cluster: Cluster, folder: Path, of_jobs: dict[str, str], options: str, *lines: str) -> tuple[str, str]:
    """Run a batch script; return the job's state and its output."""
    script = folder / "job.sbatch"
    head = ["#!/bin/bash", f"#SBATCH --job-name=train {options} --output={folder}/out.txt --time=5"]
    script.write_text("\n".join([*head, *lines, ""]))
    job = cluster.sbatch([str(script)], cwd=folder, env=of_jobs)
    state = cluster.wait(job, deadline=300)
    return state, (folder / "out.txt").read_text(errors="replace")


@pytest.mark.parametrize(
    ("options", "lines", "said"),
    [
        ("--nodes=2 --ntasks-per-node=1", ["{doctor}"], "found one process, started by the batch script itself"),
        ("--ntasks=2 --nodes=2", ["srun {doctor}"], "which Lightning refuses"),
        ("--nodes=2 --ntasks-per-node=1", ["srun {doctor} --devices 4"], "expected --ntasks-per-node=4"),
        (
            "--nodes=2 --ntasks-per-node=1",
            ["GLOO_SOCKET_IFNAME=lo srun {doctor}"],
            "GLOO_SOCKET_IFNAME=lo, by which no other node can be reached",
        ),
        (
            "--nodes=2 --ntasks-per-node=1",
            ["srun {doctor}"],
            "this job can train",
        ),
        (
            "--nodes=2 --ntasks-per-node=1 --gres=gpu:2",
            ["srun {doctor} --accelerator cpu"],
            "2 GPUs from SLURM, of which torch uses none",
        ),
        (
            "--nodes=1 --ntasks-per-node=2 --gres=gpu:2",
            ["srun bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID {doctor} --accelerator cuda'"],
            "found 1 GPU, bound to this task",
        ),
    ],
)
def test_the_doctor_says_what_is_wrong_with_a_job(
    options: str, lines: list[str], said: str, cluster: Cluster, of_jobs: dict[str, str], tmp_path: Path
) -> None:
    doctor = f"{PYTHON} -m lightning_sync.cli doctor --deadline 60"
    env = {name: value for name, value in of_jobs.items() if name != "SBATCH_GRES"}
    state, out = submit(cluster, tmp_path, env, options, *(line.replace("{doctor}", doctor) for line in lines))
    assert said in out, out
    passes = "this job can train" in said or "uses none" in said
    assert state == ("COMPLETED" if passes else "FAILED"), out
    if passes:
        assert "MB/s to rank 0" in out


def test_a_run_with_a_wrong_interface_ends_before_any_process_group(
    cluster: Cluster, of_jobs: dict[str, str], tmp_path: Path
) -> None:
    state, out = submit(
        cluster,
        tmp_path,
        of_jobs,
        "--nodes=2 --ntasks-per-node=1",
        f"GLOO_SOCKET_IFNAME=eth7 srun {PYTHON} -m lightning_sync.train trainer.max_steps=5",
    )
    assert state == "FAILED"
    assert out.count("GLOO_SOCKET_IFNAME=eth7, which does not exist here") == 1, out
    assert out.count("error: preflight failed (interface); nothing was started") == 1, out
    assert "Initializing distributed" not in out
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_sweep_of_six_jobs_finishes_and_a_failing_one_is_reported(
    cluster: Cluster, of_jobs: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    common = [
        *("-m", "lightning_sync.train", "--config-dir", f"{ROOT}/tests/slurm/conf", "-m", "hydra/launcher=slurm"),
        *("hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1", "hydra.launcher.cpus_per_task=1"),
        *("hydra.launcher.timeout_min=10", "model=tiny", "data=stateful", "logger=none"),
        *("trainer.max_steps=20", "trainer.enable_progress_bar=false", "strategy.drift_check_every=0"),
    ]
    sweep = [*common, "run_dir=sweep", "strategy=strict,diloco", "compressor=none,bf16,int8"]
    done = cluster.try_run(PYTHON, *sweep, cwd=tmp_path, env=of_jobs, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted(p.parent.name for p in (tmp_path / "sweep").glob("*/summary.json")) == list("012345")
    failing = [*common, "run_dir=bad", "compressor=none", "model.width=16,0"]
    done = cluster.try_run(PYTHON, *failing, cwd=tmp_path, env=of_jobs, timeout=300)
    assert done.returncode != 0
    assert "width=0" in done.stdout + done.stderr
    assert (tmp_path / "bad" / "0" / "summary.json").exists()
    assert not (tmp_path / "bad" / "1" / "summary.json").exists()


def test_two_clusters_and_this_machine_do_not_meet(cluster: Cluster) -> None:
    before = cluster.run("sinfo", "-h", "-N", "-o", "%N %T")
    with Cluster(1) as other:
        assert other.run("hostname").strip() == "ctl"
        assert other.run("sinfo", "-h", "-N", "-p", "normal", "-o", "%N").split() == ["node1"]
    assert cluster.run("sinfo", "-h", "-N", "-o", "%N %T") == before
    assert os.uname().nodename not in ("ctl", "node1")
