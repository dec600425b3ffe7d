"""Sees every collective of torch.distributed that the process issues, with what it is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


@dataclass(frozen=True)
class Call:
    """One collective: its name, and the tensor this rank hands over."""

    name: str
    dtype: torch.dtype | None
    numel: int
    sends: int  # elements meant for other ranks (an all-to-all also holds what stays)


@contextmanager
def census() -> Iterator[list[Call]]:
    """Record all collectives issued inside, through `torch.distributed`."""
    calls: list[Call] = []
    saved = {name: getattr(dist, name) for name in COLLECTIVES}

    def spy(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Of an all-to-all or a gather into one tensor, the second argument is what is sent.
            position = 1 if name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor") else 0
            given = args[position] if len(args) > position else None
            if isinstance(given, torch.Tensor):
                sends = given.numel()
                if name == "all_to_all_single":
                    splits = args[3]
                    sends -= splits[dist.get_rank(kwargs.get("group"))]
                calls.append(Call(name, given.dtype, given.numel(), sends))
            else:
                calls.append(Call(name, None, 0, 0))
            return saved[name](*args, **kwargs)

        return call

    try:
        for name in COLLECTIVES:
            setattr(dist, name, spy(name))
        yield calls
    finally:
        for name, original in saved.items():
            setattr(dist, name, original)
