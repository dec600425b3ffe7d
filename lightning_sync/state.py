"""Named, per-rank state: tensors that belong to parameters, whatever buffer they happen to live in.

A compressor remembers things between steps: what it has not sent yet, a warm-started factor. That memory belongs to
a *parameter*, by name. Kernels, on the other hand, want one contiguous buffer for everything that travels together,
and DDP changes what travels together after its first step. `Arena` serves both: it lays the tensors of any list of
names out contiguously, and moves the values along when the list changes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParamSpec:
    """What a compressor may know of a parameter, or of a slice of one, before training.

    Attributes:
        name: The parameter's registered name, without wrappers' prefixes.
        shape: Its shape; `(stop - start,)` for a slice.
        dtype: The gradient's dtype.
        device: Where it lives.
        start: First element of the slice in the flattened parameter, `None` for the whole parameter.
        role: Class of the module that owns it, such as ``"Linear"``, ``"Embedding"`` or ``"LayerNorm"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    start: int | None = None
    role: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def key(self) -> str:
        """Name under which state is kept: `name`, or `name[start:stop]` for a slice."""
        return self.name if self.start is None else f"{self.name}[{self.start}:{self.start + self.numel}]"

    def slice(self, start: int, stop: int) -> ParamSpec:
        """The spec of elements `start:stop` of the flattened parameter; the whole parameter stays itself."""
        if start == 0 and stop == self.numel:
            return self
        return replace(self, shape=(stop - start,), start=start)

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of residuals: at least float32, since a residual is a sum of many small numbers."""
        return torch.promote_types(torch.float32, self.dtype)


@dataclass(frozen=True)
class Cover:
    """Which elements of a parameter a tensor of undelivered values stands for, so that other ranks can take them over.

    The tensor is made of rows of `block` elements: rows `first`, `first + stride`, ... of the flattened parameter, or
    of a slice of it. What lies beyond the end of the slice is padding.

    Attributes:
        name: The parameter.
        start: First element of the slice in the flattened parameter.
        numel: Elements of the slice.
        first: Its first row.
        stride: Distance between two rows.
        block: Elements of a row.
    """

    name: str
    start: int
    numel: int
    first: int
    stride: int
    block: int

    @classmethod
    def whole(cls, param: ParamSpec, block: int | None = None) -> Cover:
        """All elements of a parameter (or of the slice that a spec names), padded to whole blocks."""
        return cls(param.name, param.start or 0, param.numel, 0, 1, block or max(1, param.numel))

    @property
    def rows(self) -> int:
        """Rows of the tensor."""
        return len(range(self.first, -(-self.numel // self.block), self.stride))

    def elements(self) -> tuple[Tensor, Tensor]:
        """For every element of the tensor: its place in the flattened parameter, and whether it is not padding."""
        rows = self.first + self.stride * torch.arange(self.rows)
        places = (rows[:, None] * self.block + torch.arange(self.block)).view(-1)
        return self.start + places, places < self.numel


def canonical_name(name: str) -> str:
    """Strip what wrappers add, so that a compiled or wrapped model finds the state of a plain one."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


class Arena:
    """Tensors by name, contiguous per group of names that are used together.

    Args:
        sizes: Elements per name.
        dtype: Dtype of all tensors of the arena.
        device: Their device.

    Every tensor starts as zeros and comes into being at its first `bind`.
    """

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = dict(sizes)
        self.dtype = dtype
        self.device = device
        self._views: dict[str, Tensor] = {}
        self._bound: dict[tuple[str, ...], Tensor] = {}

    def bind(self, names: Sequence[str]) -> Tensor:
        """Return one flat tensor that holds the tensors of `names` in this order, moving them there if need be.

        The result aliases the arena: writing to it writes the named tensors. It stays valid until one of the names
        is bound in another group, so ask again each step (a dictionary look-up when nothing has changed).
        """
        key = tuple(names)
        flat = self._bound.get(key)
        if flat is not None:
            return flat
        flat = torch.zeros(sum(self.sizes[n] for n in key), dtype=self.dtype, device=self.device)
        offset = 0
        for name in key:
            view = flat[offset : offset + self.sizes[name]]
            offset += self.sizes[name]
            if name in self._views:
                view.copy_(self._views[name])
            self._views[name] = view
        # A name lives in one place only: groups that shared a name with this one no longer hold it.
        moved = set(key)
        self._bound = {k: v for k, v in self._bound.items() if moved.isdisjoint(k)}
        self._bound[key] = flat
        return flat

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def items(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors that exist so far, by name."""
        return self._views.items()

    def forget(self, name: str) -> None:
        """Make a tensor not exist again; the others of its group keep their values."""
        if self._views.pop(name, None) is not None:
            self._bound = {k: v for k, v in self._bound.items() if name not in k}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a name that is unknown or a tensor of another size."""
        for name, value in tensors.items():
            if self.sizes.get(name) != value.numel():
                raise ValueError(
                    f"State for {name!r} has {value.numel()} elements, but this model expects {self.sizes.get(name)}. "
                    "Load it into the model it was saved from, or start with fresh state."
                )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over values by name; names that are unknown or of another size are an error, and change nothing."""
        self.check(tensors)
        for name, value in tensors.items():
            if name not in self._views:
                self.bind((name,))
            self._views[name].copy_(value.view(-1))


class Combiner(Protocol):
    """What a state knows of an aggregator; see `lightning_sync.aggregators.Aggregator`."""

    linear: ClassVar[bool]

    def combine(self, rows: Tensor, shares: Tensor) -> Tensor:
        """``[N, n]`` becomes ``[n]``."""

    def reduce(self, rows: Tensor, shares: Tensor, counts: Sequence[int]) -> Generator[Any, Any, Tensor]:
        """``[N, blocks, block]`` becomes ``[blocks, block]``, in rounds of payloads."""

    def gain(self, shares: Tensor) -> float:
        """Factor of the result."""


@dataclass
class State:
    """What one compressor remembers on one rank, and the facts of the step it may read.

    Attributes:
        params: The parameters this compressor serves, in registration order.
        rank: This rank's place in the group that reduces.
        world_size: Size of that group, N.
        seed: Seed of every private generator; the same on all ranks.
        step: Attempted steps so far, from 0; the same on all ranks.
        share: This rank's weight over the sum of all weights, 1/N by default. A compressor multiplies its input by
            `share` before anything else: contributions then *sum* to the mean, and what is left over is kept in
            units of the mean, so that it stays right when weights or the number of ranks change.
        shares: The shares of all ranks of the group, `[N]` in float64 on the CPU; `None`: 1/N each. Ranks with 0 take
            no part in this step.
        aggregator: Turns N contributions to the same elements into one; `None`: the mean. Use `combine` or `aggregate`.
        arenas: Named tensors by kind, such as ``"residual"``.
        lazy: How `declare` makes the arenas whose sizes depend on `rank` and `world_size`, which are set after
            `Compressor.init`.
        undelivered: Kinds of state that hold what has not reached the other ranks yet, in units of the mean, and which
            elements a tensor of that kind stands for. Summed over all ranks they are what is still owed: a checkpoint
            conserves that sum when the number of ranks or the compressor changes. Other kinds are taken for replicated.
        cache: Whatever can be computed again: layouts, plans. Never saved.
    """

    params: tuple[ParamSpec, ...]
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    step: int = 0
    share: float = 1.0
    shares: Tensor | None = None
    aggregator: Combiner | None = None
    arenas: dict[str, Arena] = field(default_factory=dict, repr=False)
    lazy: dict[str, Callable[[State], Arena]] = field(default_factory=dict, repr=False)
    undelivered: dict[str, Callable[[State, str], Cover]] = field(default_factory=dict, repr=False)
    cache: dict[object, object] = field(default_factory=dict, repr=False)

    @property
    def all_shares(self) -> Tensor:
        """The shares of all ranks, `[N]` in float64 on the CPU."""
        if self.shares is not None:
            return self.shares
        if "equal_shares" not in self.cache:
            self.cache["equal_shares"] = torch.full((self.world_size,), 1 / self.world_size, dtype=torch.float64)
        return self.cache["equal_shares"]  # type: ignore[return-value]

    @property
    def left_out(self) -> bool:
        """Whether what this rank sends now reaches nobody, so that whatever it owes has to wait.

        A rank of share 0 has no contribution. A mean still adds up what it owes; other aggregators leave its row out.
        """
        if self.shares is None or self.aggregator is None or self.aggregator.linear:
            return False
        return float(self.shares[self.rank]) == 0

    def combine(self, rows: Tensor) -> Tensor:
        """Turn N contributions to the same elements, `[N, n]`, into the result, `[n]`; rows may be overwritten.

        Only for aggregators that treat every element by itself; see `aggregate`.
        """
        return rows.sum(0) if self.aggregator is None else self.aggregator.combine(rows, self.all_shares)

    def aggregate(self, rows: Tensor, counts: Sequence[int]) -> Generator[Any, Any, Tensor]:
        """As `combine` for blocks of several parameters, `[N, blocks, block]`, in rounds of payloads if need be.

        Args:
            rows: What each rank sent of the blocks that this rank owns; may be overwritten.
            counts: How many of the blocks belong to each parameter of the bucket, in order.
        """
        if self.aggregator is None:
            return rows.sum(0)
        return (yield from self.aggregator.reduce(rows, self.all_shares, counts))

    def spec(self, key: str) -> ParamSpec:
        """The parameter that `key` names."""
        table = self.cache.get("specs")
        if table is None:
            table = self.cache["specs"] = {p.key: p for p in self.params}
        return table[key]  # type: ignore[index,no-any-return]

    def arena(self, kind: str, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> Arena:
        """Declare (once) the named tensors of one kind, such as ``"residual"``."""
        if kind not in self.arenas:
            self.arenas[kind] = Arena(sizes, dtype, device)
        return self.arenas[kind]

    def declare(self) -> None:
        """Make the `lazy` arenas, once `rank` and `world_size` are set. Their tensors come into being at `bind`."""
        if self.params:
            for kind in self.lazy.keys() - self.arenas.keys():
                self.arenas[kind] = self.lazy[kind](self)

    def covers(self) -> dict[str, dict[str, Cover]]:
        """Which elements each tensor of an undelivered kind stands for, ``{kind: {parameter: cover}}``."""
        return {
            kind: {key: cover(self, key) for key, _ in self.arenas[kind].items()}
            for kind, cover in self.undelivered.items()
            if kind in self.arenas
        }

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of every tensor, ``{kind: {parameter: tensor}}``: tensors and strings only."""
        return {kind: {n: t.detach().clone() for n, t in arena.items()} for kind, arena in self.arenas.items()}

    def check(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise ValueError for kinds, names or sizes that `load_state_dict` cannot take."""
        self.declare()
        for kind, tensors in state.items():
            if kind not in self.arenas:
                raise ValueError(f"State holds {kind!r}, which this compressor does not keep: {sorted(self.arenas)}.")
            self.arenas[kind].check(tensors)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state_dict` returned; unknown kinds, names or sizes are an error, and change nothing."""
        self.check(state)
        for kind, tensors in state.items():
            self.arenas[kind].load(tensors)

    @contextmanager
    def held(self, keys: Iterable[str]) -> Iterator[None]:
        """Whatever happens inside, the state of these parameters is afterwards, bit for bit, what it was before."""
        self.declare()
        saved = [(a, k, a[k].clone() if k in a else None) for a in self.arenas.values() for k in keys if k in a.sizes]
        try:
            yield
        finally:
            for arena, key, value in saved:
                if value is not None:
                    arena.load({key: value})  # what was inside may have forgotten it
                else:
                    arena.forget(key)


def undelivered_norm(states: Iterable[State]) -> Tensor | None:
    r"""The Euclidean norm of everything that compressors still owe, over all parameters; `None` if they keep nothing.

    With :math:`e_r` the residuals of this rank, in units of the mean over the ranks, :math:`\|e_r\|_2` as a scalar on
    their device. One pass over them; a reduction that runs meanwhile may be seen half done.
    """
    owed = [
        tensor
        for state in states
        for kind in state.undelivered
        if kind in state.arenas
        for _, tensor in list(state.arenas[kind].items())
    ]
    if not owed:
        return None
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.float() for n in torch._foreach_norm(owed)]))
    return total
