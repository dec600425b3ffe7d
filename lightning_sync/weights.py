r"""What every batch, and so every rank, counts for: sums of :math:`w g` over sums of w, in place of means of means."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor, nn

#: A number, or a scalar tensor on a device that the host would have to stop for.
Weight = float | Tensor


def as_weight(value: object, rank: int, step: int) -> Weight:
    """A weight that somebody gave, as a float, or as it is on a device that the host would have to stop for.

    Args:
        value: A number, or a tensor of one element.
        rank: Who has it, for the message.
        step: When, for the message.

    Raises:
        TypeError: if it is neither.
        ValueError: if it is negative or not finite (not on a device: see `WeightDoubt`).
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise TypeError(f"step {step}, rank {rank}: the weight of a batch has shape {tuple(value.shape)}, not one.")
        if value.device.type != "cpu":
            wide = torch.float32 if value.device.type == "mps" else torch.float64
            return value.detach().reshape(()).to(wide)
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"step {step}, rank {rank}: the weight of a batch is {value!r}, which is not a number.")
    weight = float(value)
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(_bad(weight, rank, step))
    return weight


def _bad(weight: float, rank: int, step: int) -> str:
    return (
        f"step {step}, rank {rank}: the weight of a batch is {weight:g}. Weights count samples or tokens: give a "
        "finite number of at least 0."
    )


def all_zero(step: int, ranks: str) -> ValueError:
    """The error for a step in which nobody has anything to learn from."""
    return ValueError(
        f"step {step}: the weights of all batches are 0 on {ranks}, so that there is no mean. Look for batches of "
        "padding only, or leave such batches out of the data on all ranks."
    )


@dataclass(frozen=True)
class Contribution:
    r"""What one rank brings to a reduction.

    Attributes:
        weight: :math:`W_r`, the sum of its batches' weights.
        unit: :math:`u_r`: the values to be reduced, times this, are :math:`\sum_i w_i g_i`. So the share by which they
            have to be multiplied is :math:`u_r / \sum_s W_s`.
        lowest: The smallest of the weights, where they are on a device and nobody has looked at them.
    """

    weight: Weight
    unit: Weight
    lowest: Tensor | None = None

    @property
    def ratio(self) -> Weight:
        """What the values have to be multiplied by to be this rank's own mean; 0 for a rank without weight."""
        if isinstance(self.weight, Tensor):
            return torch.where(self.weight > 0, self.unit / self.weight, 0.0)
        return self.unit / self.weight if self.weight else 0.0

    @classmethod
    def of_mean(cls, weight: Weight) -> Contribution:
        """Of values that are a mean already, such as the difference that a replica has made."""
        return cls(weight, weight)


class Window:
    r"""The weights of the micro-batches since the last reduction, on one rank.

    The loss of micro-batch i is multiplied by :math:`w_i / w_1`, with :math:`w_1` the first weight above 0, so that
    factors stay near 1 whatever is counted (a loss scaler would otherwise have to make up for counts of tokens), and
    are exactly 1 where all weights are equal. What autograd adds up is then :math:`\sum_i w_i g_i / (w_1 n)`, n being
    what each loss had been divided by.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew, where gradients are zeroed."""
        self.count = 0
        self._total: Weight = 0.0
        self._first: Weight = 0.0
        self._lowest: Tensor | None = None

    def add(self, weight: Weight) -> Weight:
        """Take note of a micro-batch; returns the factor of its loss."""
        self.count += 1
        self._total = self._total + weight
        if isinstance(weight, Tensor):
            first = torch.as_tensor(self._first, dtype=weight.dtype, device=weight.device)
            self._first = torch.where(first > 0, first, weight)
            self._lowest = weight if self._lowest is None else torch.minimum(self._lowest, weight)
            return torch.where(weight > 0, weight / self._first, 0.0)
        if weight == 0:
            return 0.0
        if isinstance(self._first, Tensor):
            self._first = torch.where(self._first > 0, self._first, weight)
            return weight / self._first
        self._first = self._first or weight
        return weight / self._first

    def close(self, divisor: float | None = None) -> Contribution:
        """What this rank brings to the reduction, after which a new window begins.

        Args:
            divisor: What each loss was divided by; `None`: as many as there were.
        """
        found = Contribution(self._total, self._first * (divisor or self.count), self._lowest)
        self.clear()
        return found


@contextmanager
def silenced(parameters: Iterable[nn.Parameter], unless: Tensor | None = None) -> Generator[None, None, None]:
    """While this is active, backward adds exactly zero to the gradients: a loss of weight 0 may well be 0/0.

    Everything else happens as ever: the same hooks run in the same order, so that DDP reduces what has accumulated.

    Args:
        parameters: Whose gradients.
        unless: A scalar boolean on a device: if it is true, gradients are left as they are.
    """

    def silence(gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if unless is None else torch.where(unless, gradient, 0.0)

    handles = [p.register_hook(silence) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class WeightDoubt:
    """Looks at weights on a device one step late, so that the host does not stop for them.

    Args:
        contribution: This rank's.
        total: Of all ranks, on the same device.
        rank: This rank.
        step: The step that they belong to.
    """

    def __init__(self, contribution: Contribution, total: Tensor, rank: int, step: int) -> None:
        lowest = torch.ones_like(total) if contribution.lowest is None else contribution.lowest
        values = torch.stack([total.reshape(()), lowest])
        on_gpu = values.device.type == "cuda"
        self._values = torch.empty(2, dtype=values.dtype, pin_memory=on_gpu)
        self._values.copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()
        self._rank, self._step = rank, step

    def settle(self) -> None:
        """Raise for weights that are negative, not finite or all 0.

        Raises:
            ValueError: naming rank and step.
        """
        if self._copied is not None:
            self._copied.synchronize()  # recorded a whole step ago
        total, lowest = self._values.tolist()
        if not (math.isfinite(lowest) and lowest >= 0):
            raise ValueError(_bad(lowest, self._rank, self._step))
        if total == 0:
            raise all_zero(self._step, "all ranks")
        if not (math.isfinite(total) and total > 0):
            raise ValueError(f"step {self._step}: the weights of all ranks add up to {total:g}.")
