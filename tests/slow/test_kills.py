"""Ranks are killed and stopped at random moments of real runs; see `tests.kills` for what is checked. The long proof:

    ./tests/run.sh -m slow tests/slow/test_kills.py -s

LIGHTNING_SYNC_TEST_KILLS and LIGHTNING_SYNC_TEST_STOPS change the numbers of trials (100 and 20), and
LIGHTNING_SYNC_TEST_SEED the first seed. Every trial prints its seed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.killed_ranks import MOMENTS, PERIODIC, RANKS, Plan, train
from tests.workers import run_ranks

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its ranks")]


def trials(*arguments: object, deadline: float) -> str:
    """Run the trials; a busy machine gets time for its processes to end, not for naming the rank."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kills", "--allowance", "20", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def reach_all(rank: int, world_size: int, folder: Path) -> None:
    for mode, moments in (MOMENTS | PERIODIC).items():
        for moment in moments:
            place = folder / mode / moment
            place.mkdir(parents=True, exist_ok=True)
            train(rank, Plan(0, signal.SIGKILL, mode, 1, moment, 1, 0.0), place, None, steps=4)


def test_every_moment_at_which_ranks_are_killed_comes(tmp_path: Path) -> None:
    """Else a trial waits for it in vain, and what it was to show is not tested."""
    run_ranks(reach_all, RANKS, tmp_path, init="env", deadline=120)
    wanted = {(mode, moment) for mode, moments in (MOMENTS | PERIODIC).items() for moment in moments}
    assert {(path.parts[-3], path.parts[-2]) for path in tmp_path.glob("*/*/ready")} == wanted


def test_one_kill_and_one_stop_are_named_by_all_others() -> None:
    text = trials("--kills", 1, "--stops", 1, "--seed", 4, deadline=150)
    assert "SIGKILL: 1 of 1 as documented" in text
    assert "SIGSTOP: 1 of 1 as documented" in text


def test_the_death_of_the_stores_host_ends_the_run_and_says_so() -> None:
    assert "SIGKILL: 1 of 1" in trials("--kills", 1, "--stops", 0, "--seed", 1, "--victim", 0, deadline=120)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_a_hundred_kills_and_twenty_stops() -> None:
    kills = int(os.environ.get("LIGHTNING_SYNC_TEST_KILLS", "100"))
    stops = int(os.environ.get("LIGHTNING_SYNC_TEST_STOPS", "20"))
    seed = int(os.environ.get("LIGHTNING_SYNC_TEST_SEED", "1000"))
    trials("--kills", kills, "--stops", stops, "--seed", seed, deadline=6 * 3600)
