"""Inf and NaN in gradients: found in one pass, named, and answered by all ranks alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_sync.comm.counters import Counters

log = logging.getLogger(__name__)

NonFinite = Literal["skip", "raise"]
POLICIES = ("skip", "raise")

#: Skipped steps in a row after which a run is ended: it learns nothing. A loss scaler that starts at 2^16 and halves at
#: every overflow is at 2^-84 by then, below anything float32 gradients need.
SKIPS_IN_A_ROW = 100


class NonFiniteError(ArithmeticError):
    """A gradient holds inf or NaN; nothing was reduced, no state of a compressor has moved.

    Args:
        step: The step, from 0.
        name: The first parameter concerned, in the order of reduction.
        rank: The rank that produced it; `None` if that is not known, because ranks look after the reduction.
        what: What of the parameter it is.
    """

    def __init__(self, step: int, name: str, rank: int | None = None, what: str = "gradient") -> None:
        super().__init__(step, name, rank, what)
        self.step, self.name, self.rank, self.what = step, name, rank, what

    def __str__(self) -> str:
        return (
            f"step {self.step}: {_where(self.name, self.rank, self.what)}. Look for a learning rate that is too high, "
            "a division by zero or a logarithm of 0 in the loss, or bad input; non_finite='skip' leaves such steps out."
        )


def check_non_finite(owner: str, value: object) -> None:
    """Raise ValueError unless it is `None`, ``"skip"`` or ``"raise"``."""
    if value is not None and value not in POLICIES:
        raise ValueError(f"{owner}(non_finite={value!r}): expected 'skip', 'raise' or None.")


def _where(name: str, rank: int | None, what: str = "gradient") -> str:
    kind, place = (f"averaged {what}", "") if rank is None else (what, f" on rank {rank}")
    return f"the {kind} of {name!r} holds inf or NaN{place}"


def nonfinite_flags(tensors: Sequence[Tensor]) -> Tensor:
    """For each tensor, whether it holds inf or NaN: booleans on the tensors' device, without stopping the host."""
    return torch.stack([~_dense(t).isfinite().all() for t in tensors])


def first_nonfinite(names: Sequence[str], tensors: Sequence[Tensor]) -> str | None:
    """The name of the first tensor that holds inf or NaN, `None` if all are finite.

    On the CPU one pass at the speed of memory; on a GPU one stop of the host. Any dtypes; integers are finite.

    Args:
        names: A name for each tensor.
        tensors: Gradients, differences, anything; all on one device.
    """
    place = _first(tensors)
    return None if place is None else names[place]


def culprit_code(tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """Who has inf or NaN, as one int64 (shape ``[1]``) whose maximum over the ranks names the lowest rank that has.

    0 if all tensors are finite; read with `culprit`. On a GPU the host does not stop.

    Args:
        tensors: The same, in the same order, on all ranks.
        rank: This rank's place in the group.
        size: Ranks in the group.
    """
    count, device = len(tensors), tensors[0].device
    if device.type == "cpu":
        place = _first(tensors)
        return torch.tensor([0 if place is None else ((size - rank) << 32) + count - place])
    flags = nonfinite_flags(tensors)
    code = ((size - rank) << 32) + count - flags.int().argmax()
    return torch.where(flags.any(), code, 0).view(1)


def culprit(code: int, names: Sequence[str], size: int) -> tuple[str, int] | None:
    """The name and the rank that an agreed `culprit_code` stands for, `None` for 0."""
    if code == 0:
        return None
    return names[len(names) - (code & 0xFFFFFFFF)], size - (code >> 32)


class Skips:
    """Counts skipped steps, says which and why, and ends a run that does nothing else.

    Args:
        counters: Where they are counted.
        speaks: Whether this rank writes to the log.
        routine: Whether skipping is part of the method, as with a loss scaler: then the log's level is info.
        ranks: Those that skip together, where they are not all.
    """

    def __init__(
        self, counters: Counters, *, speaks: bool, routine: bool = False, ranks: Sequence[int] | None = None
    ) -> None:
        self.counters = counters
        self.in_a_row = 0
        self._speaks = speaks
        self._who = "all ranks" if ranks is None else f"ranks {[*ranks]}"
        self._level = logging.INFO if routine else logging.WARNING

    def taken(self) -> None:
        """A step was finite."""
        self.in_a_row = 0

    def skipped(self, step: int, name: str, rank: int | None = None) -> None:
        """A step was skipped, on all ranks of a replica.

        Raises:
            NonFiniteError: for the 100th in a row.
        """
        self.counters.skipped_steps += 1
        self.in_a_row += 1
        if self._speaks:
            log.log(self._level, "Step %d is skipped on %s: %s.", step, self._who, _where(name, rank))
        if self.in_a_row >= SKIPS_IN_A_ROW:
            raise NonFiniteError(step, name, rank) from RuntimeError(
                f"{SKIPS_IN_A_ROW} steps in a row were skipped: this run learns nothing"
            )


class GradientCheck:
    """Looks at gradients that all ranks of a replica hold alike, so that all decide alike without asking.

    Args:
        named: The parameters, by name.
        non_finite: ``"raise"``, or ``"skip"``: all gradients become None, which no optimiser acts on.
        skips: Where skipped steps are counted.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], non_finite: NonFinite, skips: Skips) -> None:
        self._named = named
        self._non_finite = non_finite
        self._skips = skips

    def __call__(self, step: int) -> None:
        """Look once, when gradients are complete.

        Raises:
            NonFiniteError: if a gradient is not finite (``"raise"``), or 100 steps in a row were not (``"skip"``).
        """
        held = [(name, p.grad) for name, p in self._named if p.grad is not None]
        name = first_nonfinite([name for name, _ in held], [gradient for _, gradient in held])
        if name is None:
            self._skips.taken()
        elif self._non_finite == "raise":
            raise NonFiniteError(step, name)
        else:
            drop_gradients(p for _, p in self._named)
            self._skips.skipped(step, name)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Leave no gradient: optimisers pass over such parameters, momentum and weight decay included."""
    for p in parameters:
        p.grad = None


def _dense(tensor: Tensor) -> Tensor:
    values = tensor if tensor.layout == torch.strided else tensor.coalesce().values()
    return torch.view_as_real(values) if values.is_complex() else values


def _first(tensors: Sequence[Tensor]) -> int | None:
    if not tensors:
        return None
    if all(t.device.type == "cpu" for t in tensors):
        dense = [d for d in map(_dense, tensors) if d.is_floating_point() and d.numel()]
        # The fastest look there is. A norm may also overflow in a finite tensor, so it only says that all is well.
        if not dense or all(math.isfinite(n.item()) for n in torch._foreach_norm(dense)):
            return None
    flags = nonfinite_flags(tensors)
    return int(flags.int().argmax()) if bool(flags.any()) else None
