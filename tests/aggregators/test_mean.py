"""Names of aggregators, and the two that an all-reduce computes: mean and sum."""

import pytest
import torch

from lightning_sync.aggregators import Mean, Median, Sum, TrimmedMean, registry
from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import BF16, BlockInt8, Compressor, Exact, PlainBlocks, PowerSGD
from lightning_sync.testing import make_specs

HALVES = torch.tensor([0.5, 0.5], dtype=torch.float64)


def test_contributions_arrive_multiplied_by_their_share() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]]) / 2
    assert Mean().combine(rows, HALVES).tolist() == [2.0, 4.0]
    shares = torch.tensor([0.75, 0.25], dtype=torch.float64)
    assert Mean().combine(torch.tensor([[0.75], [1.25]]), shares).tolist() == [2.0]


@pytest.mark.parametrize("compressor", [Exact(), BF16(), PlainBlocks(), PowerSGD(rank=2, warmup_steps=0), BlockInt8(8)])
@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_is_the_mean_times_the_ranks_that_take_part_whatever_compresses_it(
    compressor: Compressor, size: int
) -> None:
    specs = make_specs({"w": (40, 30)})
    gradients = [[torch.randn(40, 30)] for _ in range(size)]
    mean, total, fewer = (SimulatedWorld(compressor, specs, size, aggregator=a) for a in (None, Sum(), Sum()))
    fewer.set_shares([0.5, 0.5, 0.0][:size])
    expected = mean.reduce(gradients)[0][0]
    assert torch.equal(total.reduce(gradients)[0][0], expected * size)
    if size == 3:
        two = SimulatedWorld(compressor, specs, 2).reduce(gradients[:2])[0][0] * 2
        assert torch.allclose(fewer.reduce(gradients)[0][0], two, atol=0.05)


def test_names() -> None:
    assert registry.build("mean") == Mean()
    assert registry.build(Median()) == Median()
    assert registry.build("trimmed_mean") == TrimmedMean(fraction=0.2)
    known = "mean, weighted_mean, sum, adasum, median, trimmed_mean, majority_vote"
    with pytest.raises(ValueError, match=f"aggregator='medain': expected one of {known}, or an instance of Aggregator"):
        registry.build("medain")
