"""Adasum is the operator of its paper, per parameter, whatever carries it."""

import pytest
import torch
from torch import Tensor

from lightning_sync.aggregators import Adasum
from lightning_sync.aggregators.adasum import adasum_factors
from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import BlockInt8, PlainBlocks
from lightning_sync.testing import make_specs
from tests.aggregators import references

SHAPES = {"matrix": (24, 30), "vector": (33,), "small": (2, 2)}


def through_the_exchange(contributions: list[list[Tensor]], dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """The results of all ranks, for `contributions[rank][parameter]`."""
    specs = make_specs({str(i): t.shape for i, t in enumerate(contributions[0])}, dtype)
    world = SimulatedWorld(PlainBlocks(), specs, len(contributions), aggregator=Adasum())
    return [list(r) for r in world.reduce(contributions)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 4, 8])
def test_for_powers_of_two_it_is_the_papers_recursion_for_every_parameter_alone(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mine = [
        [10.0**i * torch.randn(s, generator=generator, dtype=torch.float64) for i, s in enumerate(SHAPES.values())]
        for _ in range(size)
    ]
    for results in through_the_exchange(mine):
        for place, result in enumerate(results):
            expected = references.adasum_of_halves(torch.stack([g[place].reshape(-1) for g in mine]))
            assert torch.allclose(result.view(-1), expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_for_other_numbers_neighbours_pair_and_the_last_one_goes_on_as_it_is(size: int) -> None:
    mine = [[torch.randn(40, dtype=torch.float64)] for _ in range(size)]
    expected = references.adasum(torch.stack([g[0] for g in mine]))
    assert torch.allclose(through_the_exchange(mine)[-1][0], expected, rtol=1e-12, atol=1e-12)
    if size == 3:
        a, b, c = (g[0] for g in mine)
        assert torch.allclose(expected, references.adasum_of_two(references.adasum_of_two(a, b), c))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_orthogonal_gradients_add_up(size: int) -> None:
    directions = torch.linalg.qr(torch.randn(50, size, dtype=torch.float64)).Q.T
    mine = [[(rank + 1) * d.clone()] for rank, d in enumerate(directions)]
    result = through_the_exchange(mine)[0][0]
    assert torch.allclose(result, sum(g[0] for g in mine), atol=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_equal_gradients_are_averaged_and_so_are_parallel_pairs(size: int) -> None:
    gradient = torch.randn(50, dtype=torch.float64)
    assert torch.allclose(through_the_exchange([[gradient]] * size)[0][0], gradient, rtol=1e-12)
    pair = through_the_exchange([[gradient], [3 * gradient]])[0][0]
    assert torch.allclose(pair, 2 * gradient, rtol=1e-12)


def test_a_zero_gradient_changes_nothing_and_gradients_that_cancel_leave_the_others() -> None:
    a, b = torch.randn(2, 50, dtype=torch.float64)
    zero = torch.zeros(50, dtype=torch.float64)
    assert torch.allclose(through_the_exchange([[a], [zero]])[0][0], a, rtol=1e-12)
    assert torch.equal(through_the_exchange([[zero]] * 4)[0][0], zero)
    assert torch.allclose(through_the_exchange([[a], [-a], [b], [zero]])[0][0], b, atol=1e-12)
    for size in (1e-30, 1e30):  # squares of these leave float32's range
        result = through_the_exchange([[(a * size).float()], [(a * size).float()]], torch.float32)[0][0]
        assert torch.allclose(result.double(), a * size, rtol=1e-5)


@pytest.mark.parametrize("closeness", [1e-2, 1e-4, 1e-6])
def test_what_is_left_of_gradients_that_nearly_cancel_still_counts_as_the_paper_says(closeness: float) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b, c, d = torch.randn(4, 60, generator=generator, dtype=torch.float64)
    mine = [a, -a + closeness * b, closeness * c, closeness * d]
    result = through_the_exchange([[g] for g in mine])[0][0]
    expected = references.adasum_of_halves(torch.stack(mine))
    assert float((result - expected).abs().max() / expected.abs().max()) < 1e-3


def test_all_factors_follow_from_the_dot_products() -> None:
    vectors = torch.randn(3, 6, 20, dtype=torch.float64)  # three parameters, six ranks
    factors = adasum_factors(vectors @ vectors.mT)
    for parameter, c in zip(vectors, factors, strict=True):
        assert torch.allclose((c[:, None] * parameter).sum(0), references.adasum(parameter), rtol=1e-10)


def test_ranks_that_take_no_part_leave_their_neighbours_to_pair_with_one_another() -> None:
    gradients = [[torch.randn(40, dtype=torch.float64)] for _ in range(4)]
    specs = make_specs({"0": (40,)}, torch.float64)
    world = SimulatedWorld(PlainBlocks(), specs, 4, aggregator=Adasum())
    world.set_shares([1 / 3, 0, 1 / 3, 1 / 3])
    expected = references.adasum(torch.stack([gradients[r][0] for r in (0, 2, 3)]))
    assert torch.allclose(world.reduce(gradients)[0][0], expected, rtol=1e-12)


def test_it_goes_over_compressed_contributions_too() -> None:
    gradients = [[torch.randn(32, 40)] for _ in range(4)]
    world = SimulatedWorld(BlockInt8(64), make_specs({"w": (32, 40)}), 4, aggregator=Adasum())
    expected = references.adasum(torch.stack([g[0].double().view(-1) for g in gradients])).view(32, 40)
    result = world.reduce(gradients)[0][0]
    assert float((result - expected).norm() / expected.norm()) < 0.02


def test_it_costs_one_round_and_ten_numbers_per_parameter_at_four_ranks() -> None:
    specs = make_specs(SHAPES)
    world = SimulatedWorld(PlainBlocks(), specs, 4, record=True, aggregator=Adasum())
    world.reduce([[torch.randn(p.shape) for p in specs]] * 4)
    assert [sent[0].pattern for sent in world.sent] == ["exchange", "sum", "gather"]
    assert world.payload_bytes["sum"] == 3 * 10 * 8
    assert Adasum().wire_bytes(3, Topology(0, (0, 1, 2, 3))).sent == 1.5 * 3 * 10 * 8
