"""Ranks with different numbers of batches: their lengths, and stopping all at the shortest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn


def all_lengths(trainer: Trainer, dataloader: object) -> list[int]:
    """Batches per rank, -1 where a loader does not know (collective: on all ranks, for the same loader)."""
    length = sized_len(dataloader)
    device = trainer.strategy.root_device
    own = torch.tensor([-1 if length is None else length], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(trainer.world_size)]
    dist.all_gather(everyone, own)
    return [int(n) for n in everyone]


def stop_at_shortest(trainer: Trainer, lengths: Sequence[int]) -> None:
    """Limit training to the batches that every rank has.

    Lightning looks at its limit right after the strategy has seen a loader, so that is where it is set.
    """
    limit = trainer.limit_train_batches
    shortest = min(min(n, limit) if isinstance(limit, int) else int(n * limit) for n in lengths)
    trainer.limit_train_batches = shortest
    rank_zero_warn(
        f"The ranks have {list(lengths)} training batches. All stop an epoch after {shortest}, as asked or because of "
        "manual optimisation; give every rank the same number (Lightning's DistributedSampler does) to use all of them."
    )
