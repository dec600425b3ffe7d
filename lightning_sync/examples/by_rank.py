"""Batches of other sizes on other ranks, for machines that are not equally fast, and equally many of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


class SlicesByRank(DistributedSampler[int]):
    """Cuts every global batch into one slice per rank.

    All ranks have the same number of batches; what is left of the data at the end of an epoch is dropped. A mean over
    the ranks then counts samples of small slices for more: average with weights.

    Args:
        size: Samples of the data set.
        slices: Samples per rank and batch.
        rank: This rank.
        seed: Of the order; the same on all ranks.
    """

    def __init__(self, size: int, slices: Sequence[int], rank: int, seed: int = 0) -> None:
        # Not the base's, which splits evenly. It is the base because Lightning leaves such samplers as they are.
        self.size = size
        self.slices = list(slices)
        self.rank = rank
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.size // sum(self.slices) * self.slices[self.rank]

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        start, whole = sum(self.slices[: self.rank]), sum(self.slices)
        for first in range(0, self.size - whole + 1, whole):
            yield from order[first + start : first + start + self.slices[self.rank]]


def sizes_by_speed(total: int, speeds: Sequence[float]) -> list[int]:
    """Whole numbers of at least 1 that add up to `total`, in proportion to `speeds` as closely as possible.

    Raises:
        ValueError: If there are more speeds than `total`, or one is not above 0.
    """
    if len(speeds) > total or not all(speed > 0 for speed in speeds):
        raise ValueError(f"total={total} cannot be shared out by speeds={list(speeds)}: each needs at least 1.")
    sizes = [1] * len(speeds)
    for _ in range(total - len(speeds)):  # one more to whoever would be done with it first
        sizes[min(range(len(sizes)), key=lambda r: (sizes[r] + 1) / speeds[r])] += 1
    return sizes


def measured_speeds(device: torch.device, seconds: float = 0.3) -> list[float]:
    """How many matrix products each rank does per second, all at the same time, the same numbers on all ranks."""
    matrix = torch.randn(256, 256, device=device)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
    own = torch.tensor([done / (time.perf_counter() - began)], device=device)
    if not dist.is_initialized():
        return [float(own)]
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [float(speed) for speed in everyone]
