"""A random part of the blocks, the same on all ranks: the sparse gradient that an all-reduce can add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.checks import check_flags, check_integer
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Reduction
from lightning_sync.compressors.blocks import fade_
from lightning_sync.compressors.exact import Exact
from lightning_sync.compressors.flat import span, unflatten
from lightning_sync.compressors.random import draw, key_of
from lightning_sync.compressors.topk import check_ratio
from lightning_sync.state import Cover, ParamSpec, State

PIECE_BYTES = 2**20


@dataclass(frozen=True)
class RandomBlock(Compressor):
    r"""Send some blocks of every parameter, drawn at random with a seed that all ranks share.

    A parameter of R blocks of `block` elements is cut into :math:`K = \max(1, \mathrm{round}(ratio \cdot R))` stretches
    of R/K blocks each, up to rounding, and in every step one block of every stretch is drawn, each with the same
    probability 1/s (s blocks in the stretch), from (seed, step, name). All ranks draw the same blocks, so that the
    blocks alone are sent, without indices, and an all-reduce adds them up. They can go through another compressor
    (`then`), a chain.

    With ``unbiased=False`` :math:`C(x) = x` in the drawn blocks and 0 elsewhere: biased, with contraction
    :math:`E\|C(x) - x\|^2 \le (1 - 1/s) \|x\|^2`; error feedback is wrapped around it by default. With
    ``unbiased=True`` what is drawn is multiplied by s, so that :math:`E\,C(x) = x` and
    :math:`E\|C(x) - x\|^2 = (s - 1) \|x\|^2`, without memory. (Random-block sparsification: Vogels et al. 2019,
    section 4; Stich et al. 2018.) It loses more accuracy than a choice by size: 87.8 % against 93.6 % for top-k and
    94.4 % for PowerSGD at equal bytes in Vogels et al. (ResNet-18 on CIFAR-10).

    Payload: ``4 K block`` bytes per parameter, pattern ``"sum"``, flat in the number of ranks; or what `then` makes of
    as many elements. Memory: one float32 per element with error feedback, else none. Time without error feedback: that
    of setting the gradients to zero.

    Args:
        ratio: Share of the blocks that is sent, in (0, 1]. Lower: fewer bytes, and the same element sent less often,
            every 1/ratio steps on average.
        block: Elements of a block, 8 to 65536. Larger: less work, fewer and coarser choices.
        then: What the drawn blocks are compressed with: casts and codecs of blocks, such as `BlockInt8` or `ChunkTopK`.
            With error feedback around the chain, what a codec misses is remembered too, on both ends; what a cast
            rounds off is not.
        unbiased: Multiply what is drawn, instead of error feedback.

    Raises:
        ValueError, TypeError: for a value out of range, or a `then` with a memory of its own.
    """

    ratio: float = 0.01
    block: int = 256
    then: Compressor = field(default_factory=Exact)
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_ratio("RandomBlock", ratio=self.ratio)
        check_integer("RandomBlock", 8, block=self.block)
        if self.block > 65536:
            raise ValueError(f"RandomBlock(block={self.block!r}): expected at most 65536.")
        check_flags("RandomBlock", unbiased=self.unbiased)
        if not isinstance(self.then, Compressor):
            raise TypeError(f"RandomBlock(then={self.then!r}): expected a compressor.")
        probe = self.then.init([ParamSpec("probe", (1, self.block), torch.float32, torch.device("cpu"))])
        if probe.arenas or probe.lazy:
            raise TypeError(
                f"RandomBlock(then={self.then!r}): other blocks are drawn in every step, so `then` must keep nothing "
                "between steps. Wrap error feedback around the RandomBlock instead."
            )

    @property
    @override
    def biased(self) -> bool:  # type: ignore[override]
        return not self.unbiased

    @property
    @override
    def remembers(self) -> bool:  # type: ignore[override]
        return not self.unbiased

    @property
    @override
    def alignment(self) -> int | None:  # type: ignore[override]
        return self.block

    @property
    @override
    def aggregates(self) -> bool:  # type: ignore[override]
        return self.then.aggregates

    @override
    def accepts(self, param: ParamSpec) -> bool:
        """Matrices and larger tensors of at least 1024 elements; vectors are small, and matter."""
        return len(param.shape) > 1 and param.numel >= 1024

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        return State(tuple(params))

    @override
    def remember(self, state: State) -> None:
        if state.params:
            dtype, device = state.params[0].state_dtype, state.params[0].device
            state.arena("residual", {p.key: p.numel for p in state.params}, dtype, device)
            state.undelivered["residual"] = lambda own, key: Cover.whole(own.spec(key))

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        table, inner = self._table(keys, state), self._inner(state)
        drawn = table.draw(state.step)
        flat, starts = span(tensors)
        if flat is None:
            flat, starts = torch.cat([t.reshape(-1) for t in tensors]), table.starts
        values = table.take(flat, *table.places(drawn, starts)).to(table.dtype).mul_(state.share)
        # An overflow in a block that is not drawn must be seen as well: it makes what is sent of its parameter NaN.
        values.add_(_look_and_clear(tensors, table.dtype).mul_(0)[table.owner].view(-1, 1))
        results = yield from self.then.reduce(keys, table.split(values), inner)
        sent = torch.cat([r.reshape(-1, self.block) for r in results])
        return table.write(sent * table.sizes if self.unbiased else sent, drawn, tensors)

    @override
    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        table, inner = self._table(keys, state), self._inner(state)
        residual = state.arenas["residual"].bind(keys)
        fade_(residual, decay)
        parts = [r.view(t.shape) for r, t in zip(residual.split(table.numels), tensors, strict=True)]
        torch._foreach_add_(parts, list(tensors), alpha=state.share)
        drawn = table.draw(state.step)
        place, real = table.places(drawn, table.starts)
        values = table.take(residual, place, real)
        residual.index_fill_(0, place.view(-1), 0)
        if not self.then.remembers:
            results = yield from self.then.reduce(keys, table.split(values), inner)
        else:
            results = yield from self._then_late(keys, table, values, place, residual, inner)
        sent = torch.cat([r.reshape(-1, self.block) for r in results])
        torch._foreach_zero_(list(tensors))
        return table.write(sent, drawn, tensors)

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        return self.then.wire_bytes(self._drawn(params), topology, step)

    def _then_late(
        self, keys: Sequence[str], table: _Table, values: Tensor, place: Tensor, residual: Tensor, inner: State
    ) -> Reduction:
        """Run `then`, and take back into the residual what it leaves, on whichever end it keeps that."""

        def take_back(kind: str) -> None:
            index, real = table.left(kind, keys, inner)
            left = torch.cat([inner.arenas[kind][key] for key in keys]).masked_fill_(~real, 0)
            residual.index_add_(0, place.view(-1)[index], left)

        run = self.then.reduce_late(keys, table.split(values), inner, 0.0)
        payload = next(run)
        take_back("residual")  # before anything travels: wrappers look at the residual now
        while True:
            answer = yield payload
            try:
                payload = run.send(answer)
            except StopIteration as stop:
                for kind in inner.undelivered.keys() - {"residual"}:
                    take_back(kind)
                return cast("Sequence[Tensor]", stop.value)

    def _drawn(self, params: Sequence[ParamSpec]) -> tuple[ParamSpec, ...]:
        """What `then` sees: the drawn blocks of every parameter, under its name."""
        return tuple(ParamSpec(p.key, (self._count(p), self.block), p.state_dtype, p.device) for p in params)

    def _count(self, param: ParamSpec) -> int:
        blocks = -(-param.numel // self.block)
        return min(blocks, max(1, round(self.ratio * blocks)))

    def _inner(self, state: State) -> State:
        """The state of `then`: this one's facts, with parameters and buffers of its own, which nothing outlives."""
        key = ("then", self.ratio)
        if key not in state.cache:
            made = self.then.init(self._drawn(state.params))
            if self.then.remembers:
                self.then.remember(made)
            state.cache[key] = made
        own = cast(State, state.cache[key])
        return replace(
            state,
            params=own.params,
            share=1.0,  # what is drawn has been multiplied already
            arenas=own.arenas,
            lazy=own.lazy,
            undelivered=own.undelivered,
            cache=own.cache,
        )

    def _table(self, keys: Sequence[str], state: State) -> _Table:
        key = ("stretches", self.ratio, tuple(keys))
        if key not in state.cache:
            specs = [state.spec(k) for k in keys]
            state.cache[key] = _Table.make(specs, [self._count(p) for p in specs], self.block, state.seed)
        return cast(_Table, state.cache[key])


@dataclass
class _Table:
    """The stretches of one bucket's parameters, K in all: one block of each is drawn per step.

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
    def make(cls, specs: Sequence[ParamSpec], counts: Sequence[int], block: int, seed: int) -> _Table:
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

    def draw(self, step: int) -> Tensor:
        """The blocks of this step, counted in their parameters, ``[K, 1]``."""
        return self.first + draw(self.keys, step) % self.sizes

    def split(self, values: Tensor) -> list[Tensor]:
        """``[K, block]``, by parameter."""
        return list(values.split(self.counts))

    def places(self, drawn: Tensor, starts: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Where the drawn blocks lie in a flat tensor in which the parameters start at `starts`.

        Returns:
            Places, ``[K, block]``, and whether they are real: beyond a parameter's end they are its last element's.
            `None`: all are, as all parameters are made of whole blocks.
        """
        if starts not in self._ends:
            start = torch.tensor(starts).to(self.owner.device)
            last = torch.tensor([s + n - 1 for s, n in zip(starts, self.numels, strict=True)]).to(self.owner.device)
            self._ends[starts] = (start[self.owner].view(-1, 1), last[self.owner].view(-1, 1))
        start, last = self._ends[starts]
        place = start + drawn * self.block + torch.arange(self.block, device=drawn.device)
        if all(n % self.block == 0 for n in self.numels):
            return place, None
        return torch.minimum(place, last), place <= last

    def take(self, flat: Tensor, place: Tensor, real: Tensor | None) -> Tensor:
        """The elements at these places, ``[K, block]``, zero where they are not real."""
        values = flat.index_select(0, place.view(-1)).view(-1, self.block)
        return values if real is None else values.masked_fill_(~real, 0)

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

    def write(self, sent: Tensor, drawn: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Put what was sent, ``[K, block]``, where it belongs in tensors that are zero."""
        flat, starts = span(tensors)
        direct = flat is not None and flat.dtype == sent.dtype
        place, real = self.places(drawn, starts if direct else self.starts)
        sent = (sent if real is None else sent.masked_fill(~real, 0)).reshape(-1)
        if flat is not None and direct:
            flat.scatter_add_(0, place.view(-1), sent)
            return tensors
        return unflatten(sent.new_zeros(sum(self.numels)).scatter_add_(0, place.view(-1), sent), tensors)


def _look_and_clear(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of every tensor, not finite if one of its elements is not; the tensors become zero.

    In pieces, on the CPU: a piece that has just been read is still in the cache when it is overwritten.
    """
    sums = []
    for tensor in tensors:
        whole = tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes <= PIECE_BYTES
        pieces = [tensor] if whole else tensor.view(-1).split(PIECE_BYTES // tensor.element_size())
        parts = []
        for piece in pieces:
            parts.append(piece.sum(dtype=dtype))
            piece.zero_()
        sums.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum())
    return torch.stack(sums)
