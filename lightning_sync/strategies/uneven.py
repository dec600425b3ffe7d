"""Ranks with different numbers of batches stop together: all at the shortest, where lengths are known."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn


def stop_at_shortest(trainer: Trainer, dataloader: object) -> None:
    """Limit training to the batches that every rank has (collective: on all ranks, for the same loader).

    Exchanges need all replicas, so a rank that is out of data would leave the others waiting. Lightning looks at its
    limit right after the strategy has seen a loader, so that is where it is set. Loaders without a length are left
    alone: should they end at different steps, the run ends with the ranks that are out of data named.
    """
    length = sized_len(dataloader)
    device = trainer.strategy.root_device
    own = torch.tensor([-1 if length is None else length], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(trainer.world_size)]
    dist.all_gather(everyone, own)
    lengths = [int(n) for n in everyone]
    if min(lengths) < 0 or len(set(lengths)) == 1:
        return
    limit = trainer.limit_train_batches
    shortest = min(min(n, limit) if isinstance(limit, int) else int(n * limit) for n in lengths)
    trainer.limit_train_batches = shortest
    rank_zero_warn(
        f"The ranks have {lengths} training batches. All stop an epoch after {shortest}, since replicas meet; give "
        "every rank the same number (Lightning's DistributedSampler does) to use all of them."
    )
