"""The random generators of a process: Python's, NumPy's, torch's and that of one CUDA device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_sync.checkpoint.plain import StateFileError


def generators_state(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as tensors and numbers; CUDA's if `device` is one."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    inner = legacy["state"]
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": str(legacy["bit_generator"]),
            "key": torch.from_numpy(np.asarray(inner["key"]).astype(np.int64)),
            "pos": int(inner["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Set all generators to what `generators_state` returned; one that was not saved is left alone.

    Raises:
        StateFileError: for a state that a generator refuses; then none is changed.
    """
    before = generators_state(device)
    try:
        _set(state, device)
    except Exception as error:
        _set(before, device)
        raise StateFileError(f"the saved state of the random generators is not valid: {error}") from error


def _set(state: Mapping[str, Any], device: torch.device) -> None:
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (numpy["kind"], numpy["key"].numpy().astype(np.uint32), numpy["pos"], numpy["has_gauss"], numpy["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
