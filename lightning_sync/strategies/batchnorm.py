"""SyncBatchNorm where ranks do not meet in every step: statistics are shared inside a replica only."""

from __future__ import annotations

import torch.distributed as dist
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn


class ReplicaBatchNorm(TorchSyncBatchNorm):
    """Shares the statistics of batch normalisation among the ranks of a replica, which meet in every step anyway.

    Replicas of one rank keep ordinary batch normalisation. Between replicas, buffers are merged at exchanges.

    Args:
        replicas: The ranks of every replica, the same on all ranks. A group is made for each (collective).
        rank: This rank.
    """

    def __init__(self, replicas: list[list[int]], rank: int) -> None:
        self.group: dist.ProcessGroup | None = None
        if max(map(len, replicas)) == 1:
            rank_zero_info(
                "sync_batchnorm=True changes nothing: every replica is one rank, and statistics are not shared between "
                "replicas in a step. Their buffers are merged at exchanges."
            )
            return
        for ranks in replicas:  # every rank takes part in the creation of every group, in this order
            group = dist.new_group(ranks)
            if rank in ranks:
                self.group = group

    def apply(self, model: nn.Module) -> nn.Module:
        """Convert the layers, for this replica's group."""
        if self.group is None:
            return model
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, self.group)
        return converted

    def close(self) -> None:
        """Give the group back (local)."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
