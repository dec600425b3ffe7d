"""Ranks whose data differ: what is delivered in the long run is the true mean, since residuals stay bounded."""

from typing import Any

import pytest
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import (
    FP8,
    AcpSGD,
    BlockInt4,
    BlockInt8,
    ChunkTopK,
    Compressor,
    ErrorFeedback,
    PowerSGD,
    RandomBlock,
    Sign,
)
from lightning_sync.testing import make_specs

SHAPE = (32, 48)
STEPS = 2000


@pytest.mark.parametrize(
    ("compressor", "within"),
    [
        (ErrorFeedback(BlockInt8(64)), True),
        (ErrorFeedback(BlockInt4()), True),
        (ErrorFeedback(Sign()), True),
        pytest.param(ErrorFeedback(FP8()), True, marks=pytest.mark.slow),
        pytest.param(Sign(), False, marks=pytest.mark.slow),
        (ErrorFeedback(ChunkTopK(0.05, 512)), True),
        (ErrorFeedback(ChunkTopK(0.05, 512, "2bit", "gather")), True),
        (ErrorFeedback(RandomBlock(0.1, 32)), True),
        (ErrorFeedback(RandomBlock(0.2, 64, BlockInt8(32))), True),
        (PowerSGD(rank=2, warmup_steps=0), True),
        (AcpSGD(rank=2, warmup_steps=0), True),
        (ChunkTopK(0.05, 512), False),
    ],
    ids=repr,
)
def test_the_mean_of_what_is_delivered_is_the_true_one_within_5_percent(compressor: Compressor, within: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, own = torch.randn(2, *SHAPE, generator=generator)
    parts = [mean + 3 * own, mean - 2 * own, mean - own]
    world = SimulatedWorld(compressor, make_specs({"w": SHAPE}), 3)
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for _ in range(STEPS):
        noisy = [[p + torch.randn(SHAPE, generator=generator)] for p in parts]
        total += world.reduce(noisy)[0][0] - sum(n[0] for n in noisy) / 3 + mean
    error = float((total / STEPS - mean).norm() / mean.norm())
    assert (error <= 0.05) is within, error
