"""Aggregators: names, the mean, and what a third party's looks like."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_sync.aggregators import Aggregator, Mean, registry
from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import BlockInt8
from lightning_sync.testing import make_specs


def test_contributions_arrive_multiplied_by_their_share() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]]) / 2
    assert Mean().combine(rows).tolist() == [2.0, 4.0]
    weighted = torch.tensor([[1.0], [5.0]]) * torch.tensor([[0.75], [0.25]])
    assert Mean().combine(weighted).tolist() == [2.0]


@dataclass(frozen=True)
class Median(Aggregator):
    """Element-wise median of the ranks' gradients."""

    def combine(self, rows: Tensor) -> Tensor:
        return rows.median(0).values * len(rows)


def test_any_coordinate_wise_function_sees_all_contributions_of_a_block_codec() -> None:
    world = SimulatedWorld(BlockInt8(8), make_specs({"w": (4, 8)}), 3)
    for state in world.states:
        state.combine = Median().combine
    good, outlier = torch.randn(4, 8), torch.full((4, 8), 1e4)
    results = world.reduce([[good], [good], [outlier]])
    assert all(torch.allclose(r[0], good, atol=0.05) for r in results), "one rank gone wild changes nothing"


def test_names() -> None:
    assert registry.build("mean") == Mean()
    assert registry.build(Median()) == Median()
    with pytest.raises(ValueError, match="aggregator='medain': expected one of mean, or an instance of Aggregator"):
        registry.build("medain")
