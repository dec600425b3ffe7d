"""The recipe on padded documents shows what it says: a weighted mean is one process, a mean of means is not."""

import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "weights.py"
TINY = "--steps 20 --width 16 --depth 1 --length 32 --seeds 0 --ranks 3"


@pytest.mark.slow
@pytest.mark.dist
def test_on_padded_documents_only_the_weighted_mean_is_what_one_process_computes(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPE), *TINY.split(), "--out", str(tmp_path)]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=170).stdout
    rows = {row[2]: row for line in table.splitlines()[2:] if (row := [cell.strip() for cell in line.split("|")])}
    for column in (3, 4):
        assert float(rows["weighted_mean"][column]) < 1e-5, table
        assert float(rows["mean"][column]) > 5e-3, table
