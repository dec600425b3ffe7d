"""The layout of DDP's buckets, which decides the last bits of sums over three or more ranks, saved and pinned."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sync import _compat
from lightning_sync.ddp_hook import param_specs


def bucket_order(model: DistributedDataParallel, *, collective: bool = True) -> Sequence[nn.Parameter]:
    """The parameters in the order of DDP's buckets, if DDP finds that order out in training, else nothing.

    Args:
        model: The wrapped model.
        collective: Whether all ranks ask at the same time; needed after exactly one step.
    """
    return _compat.bucket_order(model, collective=collective) if _is_learned(model) else ()


def pin(model: DistributedDataParallel, order: Sequence[str]) -> None:
    """Begin with the buckets that the resumed run had (collective), before any hook and any step.

    Args:
        model: The wrapped model.
        order: Names of all parameters in the order to begin with; empty: leave everything as it is.
    """
    if order and _is_learned(model):
        named = {spec.name: p for spec, p in param_specs(model.module)}
        _compat.pin_buckets(model, [named[name] for name in order])


def _is_learned(model: DistributedDataParallel) -> bool:
    """DDP lays its buckets out anew after the first step, but not where it looks for unused parameters.

    With a static graph it does, but its first backward also records the graph, which a backward of zeros would spoil
    (and making the graph static after that ends in torch's "training graph has changed"). There the first step after a
    resume may differ in its last bits, over three or more ranks.
    """
    return not (model.find_unused_parameters or model.static_graph)
