"""The whole resume matrix: every mode, compressor, accumulation and optimiser, over 2, 3 and 4 ranks."""

from pathlib import Path

import pytest

from tests.checkpoint.test_matrix import FULL, MODES, matrix
from tests.workers import run_ranks


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_goes_on_bit_for_bit(mode: str, world_size: int, tmp_path: Path) -> None:
    for found in run_ranks(matrix, world_size, tmp_path, [mode], FULL, init="env", deadline=170):
        assert found == {name: [] for name in found}
        assert len(found) == len(MODES[mode].compressors) * len(FULL)
