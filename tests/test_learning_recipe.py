"""Every row of recipes/learning.py is a configuration that composes and whose strategy and compressor can be made."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))
learning: Any = importlib.import_module("learning")
sys.path.remove(str(RECIPES))


@pytest.mark.parametrize(("suite", "row"), [(name, row) for name, s in learning.SUITES.items() for row in s.rows])
def test_every_row_is_a_configuration(suite: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES / "bench"))
    chosen = learning.SUITES[suite]
    task = [word.format(batch=chosen.batch, length=chosen.length, rate=chosen.grid[0]) for word in chosen.task]
    words = {word.split("=")[0]: word for word in (*task, *chosen.rows[row])}
    with initialize_config_module("lightning_sync.examples.conf", version_base="1.3"):
        cfg = compose("train", overrides=list(words.values()))
    strategy = instantiate(cfg.strategy)
    assert isinstance(strategy, DDPStrategy)
    assert instantiate(cfg.compressor).wire_bytes  # a compressor, whatever the row
