"""The aggregator contract: N contributions to the same elements become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Payload

Combination = Generator[Payload, Payload, Tensor]


class Aggregator(ABC):
    r"""Turns N contributions to the same elements into one; a frozen dataclass of its constants.

    With shares :math:`s_r` that add up to 1 (1/N each by default), rank r sends :math:`s_r g_r`, plus what error
    feedback still owes of it, in the same units. That row divided by :math:`s_r` is the *estimate* of rank r. A rank
    whose share is 0 takes no part in this step: its row is left out, whatever it holds, and not counted as zeros.

    Class attributes:
        linear: True where the result is a multiple of the sum of the rows, which the wire can compute by itself.
            Others see every rank's contribution, and need a compressor that hands them over
            (`Compressor.exchanged`).
        coordinate_wise: True where an element of the result depends on that element of the rows alone. Others are
            `ParameterAggregator`.

    An aggregator that treats every element by itself needs `combine` only.
    """

    linear: ClassVar[bool] = False
    coordinate_wise: ClassVar[bool] = True

    @abstractmethod
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Combine the rows into one.

        Args:
            rows: ``[N, n]``, float32 or float64: row r is rank r's contribution times its share. May be overwritten.
            shares: ``[N]``, float64, on the CPU (so that nobody has to ask the device who takes part). They add up to
                1; some may be 0.

        Returns:
            ``[n]``, in the rows' dtype. For the same rows and shares always the same bits.
        """

    def reduce(self, rows: Tensor, shares: Tensor, counts: Sequence[int]) -> Combination:
        """Combine the blocks of several parameters that this rank owns, in rounds between all ranks if need be.

        Args:
            rows: ``[N, blocks, block]``, as in `combine`; padding of parameters is zero.
            shares: As in `combine`.
            counts: How many of the blocks belong to each parameter of the bucket, in order; 0 where this rank owns
                none. The parameters are the same on all ranks.

        Returns:
            ``[blocks, block]``.
        """
        yield from ()
        return self.combine(rows.flatten(1), shares).view(rows.shape[1:])

    def gain(self, shares: Tensor) -> float:
        """What the result of a linear aggregator is multiplied by in the end; residuals stay in units of the mean."""
        return 1.0

    def wire_bytes(self, parameters: int, topology: Topology) -> Bytes:
        """What one rank sends in the rounds of `reduce`, for so many parameters, when all ranks take part."""
        return Bytes()


class ParameterAggregator(Aggregator):
    """An aggregator that needs sums over whole parameters, such as norms.

    Its `reduce` sees the blocks that this rank owns, and yields `Payload("sum", ...)` to add up over all ranks what it
    knows of every parameter. The number of rounds and the shapes of payloads must be the same on all ranks: they may
    depend on the shares and on ``len(counts)``, not on the values or on who owns what.
    """

    coordinate_wise: ClassVar[bool] = False

    @abstractmethod
    def reduce(self, rows: Tensor, shares: Tensor, counts: Sequence[int]) -> Combination:
        """See `Aggregator.reduce`."""

    @override
    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Combine the rows as one whole parameter."""
        run = self.reduce(rows.unsqueeze(1), shares, (1,))
        answer: Payload | None = None
        while True:
            try:
                answer = next(run) if answer is None else run.send(answer)  # alone: a sum is what was sent
            except StopIteration as stop:
                combined: Tensor = stop.value
                return combined.view(rows.shape[1:])


def takes_part(shares: Tensor) -> list[int]:
    """The ranks whose share is not 0, in order.

    Raises:
        ValueError: if there are none.
    """
    ranks = [rank for rank, share in enumerate(shares.tolist()) if share > 0]
    if not ranks:
        raise ValueError(f"shares={shares.tolist()}: no rank takes part, so there is nothing to combine.")
    return ranks


def estimates(rows: Tensor, shares: Tensor) -> list[Tensor]:
    """Every row divided by its share, in place; rows whose share is 0 are left out."""
    ranks = takes_part(shares)
    present = [rows[rank] for rank in ranks]
    torch._foreach_mul_(present, [1 / float(shares[rank]) for rank in ranks])
    return present
