"""The cluster that the tests of this folder share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_unavailable

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.dist)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_unavailable()
    if reason is not None:
        if os.environ.get("LIGHTNING_SYNC_MUST_TEST_SLURM"):
            pytest.fail(f"the tests of SLURM may not be skipped here, but: {reason}")
        pytest.skip(reason)
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def of_jobs() -> dict[str, str]:
    """What jobs need to find this interpreter and this checkout."""
    found = os.environ.get("PYTHONPATH", "")
    return {
        "PATH": os.pathsep.join(
            [str(Path("/usr/lib/lightning-sync-tests")), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([found] if found else [])]),
        "PYTHONWARNINGS": "ignore",
        "VENV": "/nonexistent",
        "OMP_NUM_THREADS": "1",
        "SBATCH_GRES": "none",
    }
