"""Weights of batches, by themselves, and what a reducer makes of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sync.aggregators import Median, Sum, WeightedMean
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import make_wires
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import BlockInt8, ErrorFeedback, Exact, PowerSGD, as_route
from lightning_sync.contract import make_specs
from lightning_sync.reducer import Reducer
from lightning_sync.weights import Contribution, WeightDoubt, Window, as_weight, silenced
from tests.workers import run_ranks

SHAPES = {"matrix": (40, 30), "vector": (17,)}


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), torch.tensor(-2.0)])
def test_a_weight_that_counts_nothing_names_step_and_rank(value: Any) -> None:
    with pytest.raises(ValueError, match=r"step 7, rank 3: the weight of a batch is .*at least 0"):
        as_weight(value, rank=3, step=7)


@pytest.mark.parametrize("value", ["many", None, True, torch.ones(2)])
def test_a_weight_is_one_number(value: Any) -> None:
    with pytest.raises(TypeError, match="step 7, rank 3: the weight of a batch"):
        as_weight(value, rank=3, step=7)


def test_a_window_divides_by_what_it_holds() -> None:
    window = Window()
    assert [window.add(w) for w in (0.0, 6.0, 3.0, 6.0)] == [0.0, 1.0, 0.5, 1.0]
    # What autograd holds is the sum of factor * g / 4, and has to become the sum of w g / 15.
    own = window.close(divisor=4)
    assert own == Contribution(15.0, 24.0)
    assert window.close(divisor=4) == Contribution(0.0, 0.0)


def test_equal_weights_leave_losses_alone() -> None:
    window = Window()
    assert [window.add(7.0) for _ in range(3)] == [1.0, 1.0, 1.0]
    assert window.close() == Contribution(21.0, 21.0)


def test_tensors_on_a_device_give_the_same_without_being_looked_at() -> None:
    weights = [0.0, 6.0, 3.0, 6.0]
    window = Window()
    factors = [window.add(torch.tensor(w, dtype=torch.float64)) for w in weights]
    assert [float(f) for f in factors] == [0.0, 1.0, 0.5, 1.0]
    own = window.close(divisor=4)
    assert (float(own.weight), float(own.unit)) == (15.0, 24.0)
    WeightDoubt(own, torch.tensor(20.0, dtype=torch.float64), rank=1, step=4).settle()
    for bad, total, text in [(-1.0, 20.0, "step 4, rank 1: the weight"), (0.0, 0.0, "step 4: the weights of all")]:
        window.add(torch.tensor(bad, dtype=torch.float64))
        with pytest.raises(ValueError, match=text):
            WeightDoubt(window.close(), torch.tensor(total, dtype=torch.float64), rank=1, step=4).settle()


@pytest.mark.parametrize("positive", [None, torch.tensor(False), torch.tensor(True)])
def test_a_silenced_backward_adds_zeros_whatever_the_loss(positive: Tensor | None) -> None:
    layer = nn.Linear(3, 2)
    fired = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.shape))
    layer(torch.ones(4, 3)).sum().backward()
    before = layer.weight.grad.clone()
    with silenced(layer.parameters(), positive):
        (layer(torch.ones(4, 3)) * torch.zeros(4, 2)).sum().div(torch.zeros(())).backward()
    heard = positive is not None and bool(positive)
    assert torch.equal(layer.weight.grad, before) != heard
    assert len(fired) == 2, "hooks fire as ever"


def weighed(rank: int, world: int) -> dict[str, Any]:
    """Five steps with other weights in each; in the third rank 1 has none, and NaN for gradients."""
    found: dict[str, Any] = {}
    weights = torch.tensor([[3, 1, 8], [2, 2, 2], [5, 0, 1], [1, 7, 1], [4, 1, 1]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(11)
    draws = [
        [{n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(world)]
        for _ in weights
    ]
    layouts = {"flat": (Topology(rank, (0,) * world), False)}
    if world == 4:
        weights = torch.cat([weights, torch.tensor([[2.0], [0], [1], [1], [9]], dtype=torch.float64)], 1)
        layouts["two levels"] = (Topology(rank, (0, 0, 1, 1)), True)
    for layout, (topology, two_level) in layouts.items():
        for name, compressor in {
            "none": Exact(),
            "int8": ErrorFeedback(BlockInt8(block=8)),
            "powersgd": PowerSGD(rank=1, warmup_steps=1),
        }.items():
            counters = Counters()
            wires = make_wires(topology, counters, two_level=two_level)
            specs = make_specs(SHAPES, torch.float64)
            reducer = Reducer(specs, as_route(compressor), wires, WeightedMean())
            total = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
            sent, predicted = 0, 0
            for step, row in enumerate(weights):
                tensors = {n: t.clone() for n, t in draws[step][rank].items()}
                if row[rank] == 0:
                    tensors = {n: t.fill_(float("nan")) for n, t in tensors.items()}
                reducer.step = step
                assert reducer.weigh(Contribution.of_mean(float(row[rank]))) == float(row.sum())
                reducer.reduce(list(tensors), list(tensors.values()))
                for n, t in tensors.items():
                    total[n] += t
                predicted += reducer.predicted_bytes(step).sent
            sent = counters.sent.sent
            true = {
                n: sum(w * draws[s][r][n] for s, row in enumerate(weights) for r, w in enumerate(row / row.sum()))
                for n in SHAPES
            }
            owed = undelivered(reducer, specs)
            found[f"{layout}, {name}"] = (
                max(float((total[n] + owed[n].view(SHAPES[n]) - true[n]).abs().max()) for n in SHAPES),
                sent - predicted,
            )
    return found


def undelivered(reducer: Reducer, specs: Any) -> dict[str, Tensor]:
    """What all ranks together still owe, from what compressors say of their own state."""
    owed = {p.name: torch.zeros(p.numel, dtype=torch.float64) for p in specs}
    tensors = reducer.state_dict()
    for kind, covers in reducer.covers().items():
        for key, cover in covers.items():
            places, real = cover.elements()
            owed[cover.name].index_add_(0, places[real], tensors[kind][key].double().view(-1)[real])
    for value in owed.values():
        dist.all_reduce(value)
    return owed


@pytest.mark.dist
def test_what_is_delivered_and_what_is_owed_add_up_to_the_weighted_means_and_bytes_are_predicted() -> None:
    for found in run_ranks(weighed, 4, deadline=150):
        for case, (error, bytes_more) in found.items():
            assert error < 1e-10, (case, error)
            assert bytes_more == 0, case
        assert len(found) == 6


def left_out(rank: int, world: int) -> dict[str, Tensor]:
    found = {}
    for aggregator in (Median(), Sum()):
        wires = make_wires(Topology(rank, (0,) * world), Counters(), two_level=False)
        reducer = Reducer(make_specs({"a": (5,)}), as_route(Exact()), wires, aggregator)
        value = torch.full((5,), float([1, 1, 4, 100][rank]))
        if rank == 3:
            value.fill_(float("nan"))
        reducer.weigh(Contribution(1.0 if rank < 3 else 0.0, 1.0 if rank < 3 else 0.0))
        reducer.reduce(["a"], [value])
        found[type(aggregator).__name__] = value
    return found


@pytest.mark.dist
def test_a_rank_without_weight_is_left_out_of_a_median_and_of_the_number_that_a_sum_counts() -> None:
    for found in run_ranks(left_out, 4):
        assert found["Median"].tolist() == [1.0] * 5
        assert torch.allclose(found["Sum"], torch.full((5,), 6.0))
