"""Error feedback over long runs on data that differ between ranks: what arrives is right, what is kept is bounded."""

import pytest
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import FP8, BlockInt4, BlockInt8, ErrorFeedback, FusedCodec, Sign
from lightning_sync.testing import make_specs, undelivered

STEPS, RANKS = 2000, 2
# The others say nothing that these two do not, and take as long.
CODECS = [BlockInt4(), Sign(), *(pytest.param(c, marks=pytest.mark.slow) for c in (BlockInt8(), FP8()))]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_mean_of_what_is_delivered_is_the_true_mean(codec: FusedCodec) -> None:
    """Every rank has gradients of its own around a mean of its own, three times as large as the mean of all."""
    generator = torch.Generator().manual_seed(0)
    specs = make_specs({"w": (2, 300)})
    own = [0.3 * torch.randn(2, 300, generator=generator) for _ in range(RANKS)]
    common = 0.1 * torch.randn(2, 300, generator=generator)
    shift = sum(own) / RANKS
    world = SimulatedWorld(ErrorFeedback(codec), specs, RANKS)
    meant, delivered = torch.zeros(2, 300, dtype=torch.float64), torch.zeros(2, 300, dtype=torch.float64)
    kept = []
    for step in range(STEPS):
        gradients = [[mean - shift + common + 0.1 * torch.randn(2, 300, generator=generator)] for mean in own]
        meant += sum(g[0].double() for g in gradients) / RANKS
        delivered += world.reduce(gradients)[0][0].double()
        if step % 200 == 199:
            kept.append(float(undelivered(world.states, "w").norm()))
    assert float((delivered - meant).norm() / meant.norm()) < 0.05
    drift = kept[0] * STEPS / 200  # what a residual that collects the same in every step would have come to
    assert kept[-1] < 0.5 * drift, "what is kept does not grow with the number of steps"


def test_without_feedback_it_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    world = SimulatedWorld(Sign(), make_specs({"w": (1, 256)}), 2)
    common = 0.1 * torch.randn(1, 256, generator=generator)
    own = torch.randn(1, 256, generator=generator)
    delivered = sum(world.reduce([[common + own], [common - own]])[0][0] for _ in range(20)) / 20
    assert float((delivered - common).norm() / common.norm()) > 0.5
