"""Fixtures that more than one test module uses."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same examples in every run: only a change can break a test. `--hypothesis-profile=default` looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# Variables by which Lightning, torch and Hydra would take a test for a rank of a run.
_OF_A_RUN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR")
_PREFIXES = ("SLURM_", "TORCHELASTIC_", "LIGHTNING_SYNC_")

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True, scope="module")
def _leaves_the_tree_alone() -> Iterator[None]:
    """Tests write under `tmp_path`: Lightning's defaults would write to the current directory."""
    root = Path(__file__).parents[1]

    def seen() -> set[str]:
        return {p.name for p in root.iterdir() if not p.name.startswith((".", "__pycache__"))}

    before = seen()
    yield
    assert seen() <= before, f"tests left {sorted(seen() - before)} in {root}"


@pytest.fixture(autouse=True)
def _leaves_no_process_group() -> Iterator[None]:
    """A group left in this process would be the world of later tests; `run_ranks(body, 1, init="env")` leaves none."""
    yield
    left = torch.distributed.is_initialized()
    if left:
        torch.distributed.destroy_process_group()
    assert not left, "the test left a process group in pytest's own process"


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment outside of any run; what an entry changes in this process is put back."""
    for name in list(os.environ):
        if name in _OF_A_RUN or name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    before, handlers, threads = dict(os.environ), list(logging.root.handlers), torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(before)
    logging.root.handlers[:] = handlers
    torch.set_num_threads(threads)


@pytest.fixture
def command(tmp_path: Path, clean_env: None) -> Command:
    """Runs `python ARGUMENTS` in `tmp_path`, and ends it with all processes that it started at the deadline."""

    def run(*arguments: str, deadline: float = 120) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        path = [str(Path(__file__).parents[1]), str(tmp_path), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=deadline)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture
def train(command: Command) -> Command:
    """Runs the entry on the digits, two processes, without the progress bar."""

    def run(*overrides: str, deadline: float = 120) -> "subprocess.CompletedProcess[str]":
        common = ("experiment=digits", "trainer.enable_progress_bar=false")
        return command("-m", "lightning_sync.train", *common, *overrides, deadline=deadline)

    return run
