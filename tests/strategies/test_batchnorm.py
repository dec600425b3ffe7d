"""Trainer(sync_batchnorm=True): statistics are shared inside a replica, and nowhere else."""

import pytest
import torch.distributed as dist
from torch import nn

import lightning_sync as ls
from lightning_sync.strategies.batchnorm import ReplicaBatchNorm
from tests.models import Toy, fit
from tests.workers import run_ranks


def converted(rank: int, world: int, replicas: list[list[int]]) -> list[list[int]]:
    layers = ReplicaBatchNorm(replicas, rank)
    model = layers.apply(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    groups = [dist.get_process_group_ranks(m.process_group) for m in model if isinstance(m, nn.SyncBatchNorm)]
    back = layers.revert(model)
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in back.modules())
    layers.close()
    return groups


@pytest.mark.dist
def test_layers_share_statistics_inside_their_replica_only() -> None:
    assert run_ranks(converted, 4, [[0, 1], [2, 3]]) == [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]
    assert run_ranks(converted, 2, [[0], [1]]) == [[], []], "replicas of one rank keep ordinary layers"


class Normed(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.BatchNorm1d(4)


def trained(rank: int, world: int) -> None:
    module = Normed()
    for _ in range(2):
        fit(module, ls.strategy("local_sgd", sync_every=2), world, max_steps=4, sync_batchnorm=True)
    assert type(module.extra) is nn.BatchNorm1d, (
        "replicas of one rank train with ordinary layers"
    )
    with pytest.raises(ValueError, match="sync_batchnorm=True does not go with strategy='delayed'"):
        fit(Normed(), ls.strategy("delayed"), world, max_steps=2, sync_batchnorm=True)


@pytest.mark.dist
def test_replicas_of_one_rank_train_and_delayed_refuses() -> None:
    run_ranks(trained, 2, init="env")
