"""A job that is interrupted goes on where all its ranks were; `python -m tests.slurm.requeue` does it many times."""

from pathlib import Path

import pytest

from lightning_sync.strategies import NAMES
from tests.slurm.cluster import Cluster
from tests.slurm.requeue import MODES, campaign

RUNS = {"strict": 2, "diloco": 2, "async": 1}


@pytest.mark.parametrize("mode", MODES)
def test_signals_at_random_steps_lose_nothing(mode: str, cluster: Cluster, tmp_path: Path) -> None:
    if mode not in NAMES:
        pytest.skip(f"strategy={mode} is not there yet")
    (result,) = campaign(cluster, tmp_path, RUNS[mode], "signal", [mode], steps=400, tasks=1, seed=1)
    assert not result.problems, result.problems
    assert len(result.seconds) == RUNS[mode]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "runs"), [("signal", 20), ("preempt", 5), ("limit", 5), ("power", 3)])
def test_jobs_survive_whatever_interrupts_them(how: str, runs: int, cluster: Cluster, tmp_path: Path) -> None:
    modes = [mode for mode in MODES if mode in NAMES] if how == "signal" else ["strict"]
    results = campaign(cluster, tmp_path, runs, how, modes, steps=1500, tasks=2, seed=0)
    assert not [problem for result in results for problem in result.problems]
    assert sum(len(result.seconds) for result in results) == runs
