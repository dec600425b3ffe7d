"""The mean over samples or tokens, instead of over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_sync.aggregators.base import Aggregator
from lightning_sync.aggregators.mean import Mean


@dataclass(frozen=True)
class WeightedMean(Mean):
    r""":math:`\sum_{r,i} w_{ri} g_{ri} / \sum_{r,i} w_{ri}`, over ranks r and the micro-batches i of a step.

    :math:`g_{ri}` is the gradient of the loss that the training step returns, which is a mean over the samples (or
    tokens) of one micro-batch, and :math:`w_{ri}` their number. So the result is the gradient of the mean over all of
    them, as one process would compute it on the concatenated data; the plain mean of means counts a sample of a small
    batch for more. A last window of an epoch with fewer micro-batches is divided by what it holds. Differences between
    replicas are weighted by what each has learned from since the last exchange.

    Where weights come from, in this order: the module's method ``batch_weight(batch)``; a key ``"weight"`` in what its
    training step returns; the batch size, as Lightning finds it for logging. Numbers, or tensors of one element. A
    batch of weight 0 contributes nothing, even if its loss is NaN.

    On the wire it adds one number per step. Weights in CUDA tensors do not stop the host, but cost a small kernel per
    parameter and micro-batch; plain numbers cost nothing.
    """

    weighted: ClassVar[bool] = True


def is_weighted(aggregator: Aggregator) -> bool:
    """Whether an aggregator asks for weights of batches, by a class attribute ``weighted``."""
    return bool(getattr(aggregator, "weighted", False))
