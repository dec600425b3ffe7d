"""What error feedback promises when contributions become one by something else than a mean."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sync.aggregators import Adasum, Aggregator, MajorityVote, Median, TrimmedMean
from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import BlockInt8, ErrorFeedback
from lightning_sync.testing import make_specs

SHAPE, BLOCK, STEPS, SIZE = (6, 40), 16, 12, 5
CODEC = BlockInt8(BLOCK)


def streams(aggregator: Aggregator, shares: Any = None) -> tuple[SimulatedWorld, list[list[Tensor]], Tensor, Tensor]:
    """A run of some steps: the world, gradients by step and rank, what every rank sent in sum, what was delivered."""
    specs = make_specs({"w": SHAPE}, torch.float64)
    world = SimulatedWorld(ErrorFeedback(CODEC), specs, SIZE, record=True, aggregator=aggregator)
    generator = torch.Generator().manual_seed(3)
    gradients, sent, delivered = [], torch.zeros(SIZE, *SHAPE, dtype=torch.float64), torch.zeros(SHAPE).double()
    for step in range(STEPS):
        if shares is not None:
            world.set_shares(shares(step))
        gradients.append([torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(SIZE)])
        delivered += world.reduce([[g] for g in gradients[-1]])[0][0]
        for rank in range(SIZE):
            if float(world.states[0].all_shares[rank]):  # what the others send is read by nobody
                sent[rank] += decoded(world, 0, rank)
    return world, gradients, sent, delivered


def decoded(world: SimulatedWorld, round_: int, rank: int) -> Tensor:
    """What a rank's payload of the last step decodes to, in the parameter's order."""
    payload = world.sent[round_][rank]
    rows = CODEC.decode(payload.tensors, torch.float64)
    index = torch.arange(len(rows))
    order = torch.argsort(index % SIZE, stable=True)
    placed = torch.empty_like(rows)
    placed[order] = rows
    return placed.view(SHAPE)


@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(), MajorityVote(), Adasum()])
def test_every_ranks_stream_is_late_and_complete(aggregator: Aggregator) -> None:
    world, gradients, sent, _ = streams(aggregator)
    for rank, state in enumerate(world.states):
        meant = sum(step[rank] for step in gradients) / SIZE
        assert torch.allclose(sent[rank] + state.arenas["residual"]["w"].view(SHAPE), meant, atol=1e-12)


@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(), Adasum()])
def test_what_was_delivered_and_what_owners_keep_is_the_sum_of_what_was_combined(aggregator: Aggregator) -> None:
    specs = make_specs({"w": SHAPE}, torch.float64)
    world = SimulatedWorld(ErrorFeedback(CODEC), specs, SIZE, record=True, aggregator=aggregator)
    combined, delivered = torch.zeros(SHAPE).double(), torch.zeros(SHAPE).double()
    for _ in range(STEPS):
        delivered += world.reduce([[torch.randn(SHAPE, dtype=torch.float64)] for _ in range(SIZE)])[0][0]
        rows = torch.stack([decoded(world, 0, rank).view(-1) for rank in range(SIZE)])
        combined += aggregator.combine(rows, world.states[0].all_shares).view(SHAPE)
    kept = torch.zeros(SHAPE).double().view(-1, BLOCK)
    for rank, state in enumerate(world.states):
        kept[rank::SIZE] = state.arenas["owner_residual"]["w"].view(-1, BLOCK)
    assert torch.allclose(delivered + kept.view(SHAPE), combined, atol=1e-12)
    assert float(kept.abs().max()) > 1e-4, "the test would pass without a residual"


def test_a_median_over_int8_stays_as_close_to_the_true_median_as_int8_is_to_a_gradient() -> None:
    _, gradients, _, delivered = streams(Median())
    true = sum(torch.stack(step).quantile(0.5, 0) for step in gradients)
    assert float((delivered - true).norm() / true.norm()) < 0.02


def test_a_rank_that_takes_no_part_keeps_its_residual_for_the_next_step() -> None:
    absent = 3

    def shares(step: int) -> list[float]:
        weights = [0.0 if rank == absent and step % 2 else 1.0 for rank in range(SIZE)]
        return [w / sum(weights) for w in weights]

    specs = make_specs({"w": SHAPE}, torch.float64)
    world = SimulatedWorld(ErrorFeedback(CODEC, decay=0.5), specs, SIZE, aggregator=Median())
    world.reduce([[torch.randn(SHAPE, dtype=torch.float64)] for _ in range(SIZE)])
    before = world.states[absent].state_dict()["residual"]["w"]
    assert float(before.abs().max()) > 0
    world.set_shares(shares(1))
    garbage = torch.full(SHAPE, float("nan"), dtype=torch.float64)
    mine = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(SIZE)]
    result = world.reduce([[garbage if r == absent else g] for r, g in enumerate(mine)])[0][0]
    assert torch.equal(world.states[absent].state_dict()["residual"]["w"], before)
    assert bool(result.isfinite().all())
    world, gradients, sent, _ = streams(Median(), shares)
    for rank, state in enumerate(world.states):
        meant = sum(step[rank] * shares(t)[rank] for t, step in enumerate(gradients))
        assert torch.allclose(sent[rank] + state.arenas["residual"]["w"].view(SHAPE), meant, atol=1e-12)


def test_a_mean_still_collects_what_a_rank_of_share_0_owes() -> None:
    specs = make_specs({"w": SHAPE}, torch.float64)
    world = SimulatedWorld(ErrorFeedback(CODEC), specs, 2)
    world.reduce([[torch.randn(SHAPE, dtype=torch.float64)] for _ in range(2)])
    before = float(world.states[1].arenas["residual"]["w"].norm())
    world.set_shares([1.0, 0.0])
    world.reduce([[torch.randn(SHAPE, dtype=torch.float64)] for _ in range(2)])
    assert float(world.states[1].arenas["residual"]["w"].norm()) < 0.02 * before
