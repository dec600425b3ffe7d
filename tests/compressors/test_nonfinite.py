"""One step with NaN or inf shows in that step, as in plain DDP, and never again."""

from typing import Any

import pytest
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import (
    FP8,
    QSGD,
    AcpSGD,
    BlockInt4,
    BlockInt8,
    ChunkTopK,
    ErrorFeedback,
    PowerSGD,
    Schedule,
    Sign,
    SignVote,
)
from lightning_sync.state import ParamSpec

SPECS = [ParamSpec(n, (64, 48), torch.float64, torch.device("cpu")) for n in ("a", "b")]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "compressor",
    [
        ErrorFeedback(BlockInt8()),
        BlockInt8(),
        *(ErrorFeedback(codec) for codec in (BlockInt4(), BlockInt4(stochastic=True), FP8(), Sign(), Sign(72))),
        QSGD(),
        Sign(),
        SignVote(),
        Schedule([(0, ErrorFeedback(BlockInt8())), (3, ErrorFeedback(Sign())), (5, ErrorFeedback(BlockInt4()))]),
        PowerSGD(rank=2, warmup_steps=0),
        PowerSGD(rank=2, warmup_steps=0, residual="aggregate"),
        AcpSGD(rank=2, warmup_steps=0),
        AcpSGD(rank=2, warmup_steps=1),
        *(
            ErrorFeedback(ChunkTopK(0.1, 64, value, pattern))
            for value, pattern in (("fp32", "exchange"), ("fp32", "gather"), ("bf16", "exchange"), ("2bit", "gather"))
        ),
    ],
    ids=repr,
)
def test_a_nonfinite_step_is_seen_once_and_then_forgotten(compressor: Any, bad: float) -> None:
    world = SimulatedWorld(compressor, SPECS, 3)
    generator = torch.Generator().manual_seed(0)
    wrong, total = [], torch.zeros(64, 48, dtype=torch.float64)
    for step in range(60):
        gradients = [
            [torch.randn(64, 48, generator=generator, dtype=torch.float64) + 1 for _ in SPECS] for _ in range(3)
        ]
        if step == 2:
            gradients[1][0][5, 7] = bad
        first, second = world.reduce(gradients)[0]
        if not bool(first.isfinite().all()):
            wrong.append(step)
        assert bool(second.isfinite().all()), "the other parameter is not concerned"
        if step > 2:
            total += first - sum(g[0] for g in gradients) / 3
    assert wrong == [2]
    # What was delivered since then differs from the truth by what the residuals hold, which is bounded.
    assert float(total.norm()) / 57 < float(torch.ones(64, 48).norm())
