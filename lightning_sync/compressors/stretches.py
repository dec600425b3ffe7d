"""Which blocks of a bucket's parameters are drawn in a step, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sync.compressors.flat import span, unflatten
from lightning_sync.compressors.random import draw, key_of
from lightning_sync.state import ParamSpec, State


@dataclass
class Stretches:
    """Runs of blocks of one bucket's parameters, K in all: one block of each is drawn per step.

    Attributes:
        block: Elements per block.
        dtype: Dtype of what is sent.
        numels: Elements of every parameter.
        counts: Stretches of every parameter.
        starts: Where each parameter starts if they lie one after the other.
        owner: Each stretch's parameter, by its place in the bucket, ``[K]``.
        first: Each stretch's first block, ``[K, 1]``.
        sizes: Blocks of each stretch, ``[K, 1]``.
        keys: What is drawn with, ``[K, 1]``.
    """

    block: int
    dtype: torch.dtype
    numels: tuple[int, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    owner: Tensor
    first: Tensor
    sizes: Tensor
    keys: Tensor
    _ends: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _left: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def make(cls, specs: Sequence[ParamSpec], counts: Sequence[int], block: int, seed: int) -> Stretches:
        """The stretches of these parameters."""
        bounds, keys = [], []
        for p, count in zip(specs, counts, strict=True):
            bounds.append(torch.arange(count + 1) * -(-p.numel // block) // max(1, count))
            keys.append(torch.arange(count) + key_of(seed, p.key))
        numels = tuple(p.numel for p in specs)
        device = specs[0].device
        return cls(
            block=block,
            dtype=specs[0].state_dtype,
            numels=numels,
            counts=tuple(counts),
            starts=tuple(sum(numels[:i]) for i in range(len(numels))),
            owner=torch.arange(len(specs)).repeat_interleave(torch.tensor(counts)).to(device),
            first=torch.cat([b[:-1] for b in bounds]).view(-1, 1).to(device),
            sizes=torch.cat([b.diff() for b in bounds]).view(-1, 1).to(device),
            keys=torch.cat(keys).view(-1, 1).to(device),
        )

    def split(self, values: Tensor) -> list[Tensor]:
        """``[K, block]``, by parameter."""
        return list(values.split(self.counts))

    def ends(self, starts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Each stretch's parameter's first and last element, where the parameters start at `starts`, ``[K, 1]``."""
        if starts not in self._ends:
            start = torch.tensor(starts).to(self.owner.device)
            last = torch.tensor([s + n - 1 for s, n in zip(starts, self.numels, strict=True)]).to(self.owner.device)
            self._ends[starts] = (start[self.owner].view(-1, 1), last[self.owner].view(-1, 1))
        return self._ends[starts]

    def left(self, kind: str, keys: Sequence[str], inner: State) -> tuple[Tensor, Tensor]:
        """For everything that `then` keeps of one kind: which drawn element it belongs to, and whether it is real."""
        if kind not in self._left:
            places, reals, offset = [], [], 0
            for key, count in zip(keys, self.counts, strict=True):
                place, real = inner.undelivered[kind](inner, key).elements()
                places.append(torch.where(real, place, 0) + offset)
                reals.append(real)
                offset += count * self.block
            device = self.owner.device
            self._left[kind] = (torch.cat(places).to(device), torch.cat(reals).to(device))
        return self._left[kind]


class Drawn:
    """The blocks of one step.

    Args:
        table: The stretches they are drawn from.
        step: The step.
    """

    def __init__(self, table: Stretches, step: int) -> None:
        self.table = table
        self.blocks = table.first + draw(table.keys, step) % table.sizes  # counted in their parameters
        self._places: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}

    def places(self, starts: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Where the drawn blocks lie in a flat tensor in which the parameters start at `starts`.

        Returns:
            Places, ``[K, block]``, and whether they are real: beyond a parameter's end they are its last element's.
            `None`: all are, as all parameters are made of whole blocks.
        """
        if starts not in self._places:
            start, last = self.table.ends(starts)
            block = self.table.block
            place = start + self.blocks * block + torch.arange(block, device=start.device)
            whole = all(n % block == 0 for n in self.table.numels)
            self._places[starts] = (place, None) if whole else (torch.minimum(place, last), place <= last)
        return self._places[starts]

    def take(self, flat: Tensor, starts: tuple[int, ...]) -> Tensor:
        """The drawn elements, ``[K, block]``, zero beyond a parameter's end."""
        place, real = self.places(starts)
        values = flat.index_select(0, place.view(-1)).view(-1, self.table.block)
        return values if real is None else torch.where(real, values, 0)

    def write(self, sent: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Set the tensors to what was sent, ``[K, block]``, and to zero elsewhere."""
        flat, starts = span(tensors)
        direct = flat is not None and flat.dtype == sent.dtype
        place, real = self.places(starts if direct else self.table.starts)
        sent = (sent if real is None else torch.where(real, sent, 0)).reshape(-1)
        if flat is not None and direct:
            torch._foreach_zero_(list(tensors))
            flat.scatter_add_(0, place.view(-1), sent)
            return tensors
        dense = sent.new_zeros(sum(self.table.numels)).scatter_add_(0, place.view(-1), sent)
        return unflatten(dense, tensors)
