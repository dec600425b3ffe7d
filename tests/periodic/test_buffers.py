"""Buffers of several ranks become one set."""

import pytest
import torch
from torch import Tensor, nn

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.periodic.buffers import BufferMerge
from tests.workers import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("scale", torch.zeros(3, dtype=torch.bfloat16))


def filled(rank: int) -> Model:
    model = Model()
    with torch.no_grad():
        norm = model.inner[1]
        norm.running_mean.copy_(torch.arange(5.0) + 100 * rank)
        norm.running_var.copy_(torch.arange(1.0, 6.0) * (rank + 1))
        norm.num_batches_tracked.fill_(10 + rank)
        model.seen.copy_(torch.tensor([rank, 7 - rank]))
        model.flag.fill_(rank == 1)
        model.scale.fill_(rank)
    return model


def merged(rank: int, world: int, policy: str) -> dict[str, Tensor]:
    import torch.distributed as dist

    wire = GroupWire(dist.new_group(), Topology(rank, (0,) * world), Counters())
    merge = BufferMerge(filled(rank), policy)  # type: ignore[arg-type]
    return merge.merge(merge.snapshot(), wire)


@pytest.mark.dist
def test_means_maxima_and_the_variance_between_ranks() -> None:
    results = run_ranks(merged, 3, "average")
    models = [filled(r) for r in range(3)]
    means = torch.stack([m.inner[1].running_mean.double() for m in models])
    variances = torch.stack([m.inner[1].running_var.double() for m in models])
    expected = {
        "inner.1.running_mean": means.mean(0),
        "inner.1.running_var": variances.mean(0) + means.var(0, correction=0),
        "inner.1.num_batches_tracked": torch.tensor(12),
        "seen": torch.tensor([2, 7]),
        "flag": torch.tensor([True]),
        "scale": torch.ones(3),
    }
    for got in results:
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(got[name].double(), value.double(), rtol=1e-6), name
            assert torch.equal(got[name], results[0][name]), name


@pytest.mark.dist
def test_or_the_first_rank_decides() -> None:
    for got in run_ranks(merged, 2, "rank0"):
        assert all(torch.equal(got[name], buffer) for name, buffer in filled(0).named_buffers())
