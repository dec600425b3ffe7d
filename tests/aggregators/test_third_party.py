"""An aggregator of somebody else is one class in one file; this one needs norms of whole parameters.

It also shows an element-wise one, which needs a single method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sync as ls
from lightning_sync.aggregators import estimates, registry
from lightning_sync.aggregators.base import Combination
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors import Payload
from lightning_sync.testing import check_aggregator
from tests.models import Toy, fit
from tests.workers import run_ranks


@dataclass(frozen=True)
class Midrange(ls.Aggregator):
    """Half way between the smallest and the largest value of every element."""

    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        low, high = torch.stack(estimates(rows, shares)).aminmax(dim=0)
        return (low + high) / 2


@dataclass(frozen=True)
class Clipped(ls.ParameterAggregator):
    """The mean of contributions whose norms, parameter by parameter, are cut to a radius."""

    radius: float = 1.0

    def reduce(self, rows: Tensor, shares: Tensor, counts: Sequence[int]) -> Combination:
        present = torch.stack(estimates(rows, shares))  # [M, blocks, block]
        squares = torch.stack([part.double().square().sum((1, 2)) for part in present.split(list(counts), dim=1)], 1)
        squares = (yield Payload("sum", (squares,))).tensors[0]  # [M, parameters]
        factors = (self.radius / squares.sqrt().clamp(min=1e-30)).clamp(max=1)
        factors = factors.repeat_interleave(torch.tensor(counts), dim=1).to(present.dtype)
        return (present * factors[..., None]).mean(0)

    def wire_bytes(self, parameters: int, topology: Topology) -> Bytes:
        return topology.all_reduce(8 * topology.size * parameters)


def clipped(contributions: Tensor, shares: Tensor) -> Tensor:
    return torch.stack([g * min(1.0, 1.0 / float(g.norm())) for g in contributions]).mean(0)


def test_both_keep_the_contract() -> None:
    check_aggregator(Midrange())
    check_aggregator(Clipped(), reference=clipped, keeps_equal=False)


def train(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for aggregator in (Midrange(), Clipped()):
        for compressor in ("none", "int8"):
            torch.manual_seed(0)
            module, strategy = Toy(), ls.StrictStrategy(compressor=compressor, aggregator=aggregator)
            fit(module, strategy, world_size, max_steps=4)
            found[type(aggregator).__name__, compressor] = (
                strategy.describe()["aggregator"],
                module.losses,
                [p.detach().clone() for p in module.parameters()],
            )
    return found


@pytest.mark.dist
def test_they_train_and_all_ranks_stay_equal() -> None:
    first, second = run_ranks(train, 2, init="env", deadline=100)
    for case, (name, losses, params) in first.items():
        assert name == case[0]
        assert losses[-1] < losses[0]
        assert all(torch.equal(a, b) for a, b in zip(params, second[case][2], strict=True))


def test_a_name_is_registered_once() -> None:
    registry.register("midrange", Midrange)
    try:
        assert registry.build("midrange") == Midrange()
        assert ls.StrictStrategy(aggregator="midrange").describe()["aggregator"] == "midrange"
        with pytest.raises(ValueError, match="aggregator 'midrange' is already registered"):
            registry.register("midrange", Clipped)
    finally:
        del registry._factories["midrange"]


def test_what_hides_contributions_is_refused_for_it_as_for_ours() -> None:
    with pytest.raises(ValueError, match=r"aggregator='Midrange'.*is refused: it is a sum on the wire"):
        ls.StrictStrategy(compressor="powersgd", aggregator=Midrange())
