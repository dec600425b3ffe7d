"""The simulated world: what collectives do, said in a few lines, and the reference for the real wire."""

import torch

from lightning_sync.comm.simulated import SimulatedWorld, combine
from lightning_sync.compressors import BlockInt8, Exact, Payload
from lightning_sync.testing import make_specs


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1)


def test_a_sum_gives_every_rank_the_total_in_its_own_tensor() -> None:
    mine = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    back = combine([Payload("sum", (t,)) for t in mine])
    assert [p.tensors[0].tolist() for p in back] == [[11, 22], [11, 22]]
    assert all(p.tensors[0] is t for p, t in zip(back, mine, strict=True))


def test_an_exchange_gives_every_owner_what_all_ranks_sent_for_its_rows() -> None:
    sent = [rows(1, 2, 3), rows(10, 20, 30)]
    back = combine([Payload("exchange", (t,), (1, 2)) for t in sent])
    assert back[0].tensors[0].squeeze(-1).tolist() == [[1], [10]]
    assert back[1].tensors[0].squeeze(-1).tolist() == [[2, 3], [20, 30]]


def test_a_gather_gives_every_rank_all_rows_in_rank_order() -> None:
    back = combine([Payload("gather", (t,), (1, 0, 2)) for t in (rows(1), rows(), rows(2, 3))])
    assert [p.tensors[0].view(-1).tolist() for p in back] == [[1, 2, 3]] * 3


def test_it_leaves_inputs_alone_counts_steps_and_records_what_was_sent() -> None:
    world = SimulatedWorld(BlockInt8(8), make_specs({"w": (2, 8)}), 2, record=True)
    gradient = torch.randn(2, 8)
    before = gradient.clone()
    results = world.reduce([[gradient], [gradient]])
    assert torch.equal(gradient, before)
    assert torch.equal(results[0][0], results[1][0])
    assert [s.step for s in world.states] == [1, 1]
    assert [round_[0].pattern for round_ in world.sent] == ["exchange", "gather"]
    assert world.payload_bytes == {"exchange": 2 * 12, "gather": 12}


def test_a_hundred_ranks_cost_nothing() -> None:
    world = SimulatedWorld(Exact(), make_specs({"w": (3,)}, torch.float64), 100)
    results = world.reduce([[torch.full((3,), float(r), dtype=torch.float64)] for r in range(100)])
    assert torch.allclose(results[99][0], torch.full((3,), 49.5, dtype=torch.float64))
