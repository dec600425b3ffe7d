"""Tied weights, data without a length, and an overflow inside a replica, in modes whose replicas differ."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_sync as ls
from tests.models import Toy, everything, fit
from tests.workers import run_ranks


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """12 batches, others on every rank; nobody knows how many beforehand."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(48):
            yield torch.randn(16, generator=generator), torch.randn(16, generator=generator)


class Tied(Toy):
    """One matrix serves two layers, and rank 1's loss overflows in batch 2."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.encode = nn.Linear(16, 16, bias=False)
        self.decode = nn.Linear(16, 16, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        return super().forward(self.decode(torch.tanh(self.encode(x))), extra)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.rank == 1 and batch_idx == 2 else loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(self.rank), batch_size=4)


def trained(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "hybrid": {"sync_every": 4, "replica": 2, "compressor": "int8"},
        "streaming_diloco": {"sync_every": 8, "fragments": 2, "overlap_steps": 2, "warmup_steps": 2},
        "delayed": {},
    }.items():
        torch.manual_seed(0)
        module = Tied(rank)
        plugin = ls.WirePrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        strategy = ls.strategy(name, **options)
        fit(module, strategy, world, -1, max_epochs=1, plugins=[plugin])
        scale = plugin.scaler.get_scale() if plugin.scaler is not None else 0.0
        found[name] = (strategy.counters.steps, scale, everything(module))
    return found


@pytest.mark.dist
def test_tied_weights_streams_and_an_overflow_inside_a_replica() -> None:
    ranks = run_ranks(trained, 4, init="env", deadline=170)
    for name in ranks[0]:
        for rank in ranks:
            assert rank[name][0] == 12, name
            final = rank[name][2]
            assert torch.equal(final["encode.weight"], final["decode.weight"])
            assert all(torch.equal(final[n], v) for n, v in ranks[0][name][2].items()), (
                f"{name}: replicas end different"
            )
            assert all(bool(v.isfinite().all()) for v in final.values() if v.is_floating_point()), name
    assert [rank["hybrid"][1] for rank in ranks] == [4.0, 4.0, 8.0, 8.0], "the whole replica skips, and only it"
    assert [rank["delayed"][1] for rank in ranks] == [4.0] * 4, "all ranks skip"
