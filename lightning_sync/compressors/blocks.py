"""Parameters cut into blocks, and the two-phase reduction of encoded blocks.

Quantised values cannot be added up on the wire (an int8 sum wraps round), so every block has an *owner*: all ranks
send it their encoded version, the owner decodes all N, combines them, encodes the result and sends it to all. Each
rank sends 2 (N-1)/N of the payload, whatever N is, as a ring all-reduce does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.finite import finite_rows, forget_
from lightning_sync.state import Arena, Cover, ParamSpec, State


class BlockCodec(Compressor):
    """A compressor that encodes blocks of `block` elements, each on its own.

    Subclasses are frozen dataclasses with a field or attribute `block` and three methods. Blocks do not cross
    parameters; the last block of a parameter is padded with zeros. The owner of a block is its index, counted over
    all parameters in registration order, modulo N: it depends neither on DDP's buckets nor on what else is sent.
    """

    block: int
    aggregates = True
    remembers = True
    by_parameter = True

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """Parameters may be cut between blocks."""
        return self.block

    @abstractmethod
    def encode(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Encode `blocks`, ``[rows, block]`` in float32 or float64: tensors of `rows` rows, of any dtype."""

    def encode_(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Encode, and leave in `blocks` what the code misses: ``blocks - decode(encode(blocks))``, in place."""
        code = self.encode(blocks)
        blocks.sub_(self.decode(code, blocks.dtype))
        return code

    def encode_rest_(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """As `encode_`, but a block with inf or NaN, which shows in its code, is left zero: it starts afresh."""
        code = self.encode_(blocks)
        forget_(blocks, finite_rows(blocks))
        return code

    @abstractmethod
    def decode(self, code: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Decode what `encode` returned, with any leading axes: ``[..., rows, block]``."""

    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one encoded block."""

    def accepts(self, param: ParamSpec) -> bool:
        """Matrices and larger tensors of at least 1024 elements; vectors are small, and matter."""
        return len(param.shape) > 1 and param.numel >= 1024

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        state = State(tuple(params))
        first, table = 0, {}
        for p in params:
            table[p.key] = first
            first += _rows(p.numel, self.block)
        state.cache["first_block"], state.cache["block"] = table, self.block
        return state

    @override
    def remember(self, state: State) -> None:
        """A residual on both ends: of what this rank has not sent, and of the blocks it owns."""
        state.lazy.update(feedback_arenas(self.block))
        state.undelivered.update(feedback_covers(self.block))

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        plan = block_plan(self.block, keys, state)
        blocks = torch.zeros(plan.rows, self.block, dtype=plan.dtype, device=tensors[0].device)
        torch._foreach_add_(plan.views(blocks), list(tensors), alpha=state.share)
        owned = yield plan.exchange(self.encode(blocks))
        combined = yield from state.aggregate(self.decode(owned.tensors, plan.dtype), plan.counts)
        everything = yield plan.gather(self.encode(combined))
        return self.write(plan.restore(everything.tensors), plan, tensors)

    @override
    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        plan = block_plan(self.block, keys, state)
        # The residual is the work buffer: it becomes x, then x - C(x), without another copy of the gradient.
        residual = worker_residual(self.block, keys, state)
        if state.left_out:
            code = self.encode(residual)  # read by nobody; the other ranks wait for something of this size
        else:
            fade_(residual, decay)
            torch._foreach_add_(plan.views(residual), list(tensors), alpha=state.share)
            code = self.encode_rest_(residual)
        owned = yield plan.exchange(code)
        late = owner_residual(self.block, keys, state)
        fade_(late, decay)
        late.add_((yield from state.aggregate(self.decode(owned.tensors, plan.dtype), plan.counts)))
        everything = yield plan.gather(self.encode_rest_(late))
        return self.write(plan.restore(everything.tensors), plan, tensors)

    def write(self, code: Sequence[Tensor], plan: BlockPlan, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Decode a bucket's blocks into its gradients."""
        return plan.write(self.decode(code, plan.dtype), tensors)

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        rows = sum(_rows(p.numel, self.block) for p in params)
        owned = [owned_rows(rows, rank, topology.size) * self.row_bytes() for rank in range(topology.size)]
        return topology.all_to_all(owned) + topology.all_gather(owned[topology.rank])


def fade_(residual: Tensor, decay: float) -> None:
    """Multiply by `decay`, in place; 0 forgets, also what is not finite."""
    if decay == 0:
        residual.zero_()
    elif decay != 1:
        residual.mul_(decay)


def _rows(numel: int, block: int) -> int:
    return -(-numel // block)


def owned_rows(rows: int, rank: int, world_size: int) -> int:
    """How many of the first `rows` blocks belong to a rank."""
    return len(range(rank, rows, world_size))


def cache_rows(blocks: Tensor) -> int:
    """Rows of `blocks` to work on at a time: half a MiB on the CPU, all of them elsewhere."""
    return (
        max(1, 2**19 // max(1, blocks.shape[1] * blocks.element_size()))
        if blocks.device.type == "cpu"
        else max(1, len(blocks))
    )


@dataclass
class BlockPlan:
    """Where the blocks of one bucket lie, and who owns which: computed once per bucket, reused every step.

    `counts` says how many blocks of each parameter this rank owns, in the bucket's order.
    """

    block: int
    dtype: torch.dtype
    rows: int
    shapes: list[tuple[int, ...]]
    starts: list[int]
    order: Tensor
    inverse: Tensor
    splits: tuple[int, ...]
    rank: int
    counts: tuple[int, ...]
    _places: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def places(self, starts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Where blocks lie in a flat tensor in which the parameters start at `starts`, ``[rows, 1]`` each, int64.

        Returns:
            The place of every block's first element, and that of the last element of its parameter.
        """
        if starts not in self._places:
            sizes = [torch.Size(shape).numel() for shape in self.shapes]
            firsts = [range(a, a + n, self.block) for a, n in zip(starts, sizes, strict=True)]
            first = torch.tensor([p for part in firsts for p in part])
            last = torch.tensor([a + n - 1 for a, n in zip(starts, sizes, strict=True)])
            last = last.repeat_interleave(torch.tensor([len(part) for part in firsts]))
            device = self.order.device
            self._places = {starts: (first.view(-1, 1).to(device), last.view(-1, 1).to(device))}
        return self._places[starts]

    def views(self, blocks: Tensor) -> list[Tensor]:
        """The parameters' elements inside `blocks`, without the padding, as views with the parameters' shapes."""
        flat = blocks.view(-1)
        return [
            flat[s * self.block : s * self.block + torch.Size(shape).numel()].view(shape)
            for s, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def exchange(self, code: Sequence[Tensor]) -> Payload:
        """Encoded blocks, sorted by owner."""
        return Payload("exchange", tuple(t.index_select(0, self.order) for t in code), self.splits)

    def gather(self, code: Sequence[Tensor]) -> Payload:
        """This rank's combined and re-encoded blocks."""
        return Payload("gather", tuple(code), self.splits)

    def restore(self, code: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Encoded blocks of all owners, back in the bucket's order."""
        return tuple(t.index_select(0, self.inverse) for t in code)

    def write(self, blocks: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy decoded blocks into the gradients."""
        torch._foreach_copy_(list(tensors), self.views(blocks))
        return tensors


def block_plan(block: int, keys: Sequence[str], state: State) -> BlockPlan:
    """The plan for these parameters, made at first use."""
    cache_key = ("plan", tuple(keys))
    if cache_key not in state.cache:
        state.cache[cache_key] = _make_plan(block, keys, state)
    return cast(BlockPlan, state.cache[cache_key])


def _make_plan(block: int, keys: Sequence[str], state: State) -> BlockPlan:
    first_block = cast("dict[str, int]", state.cache["first_block"])
    specs = [state.spec(k) for k in keys]
    device = specs[0].device
    rows = [_rows(p.numel, block) for p in specs]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    index = torch.cat([torch.arange(first_block[k], first_block[k] + n) for k, n in zip(keys, rows, strict=True)])
    owner = index % state.world_size
    order = torch.argsort(owner, stable=True)
    inverse = torch.argsort(order, stable=True)
    splits = tuple(int(c) for c in torch.bincount(owner, minlength=state.world_size))
    return BlockPlan(
        block=block,
        dtype=specs[0].state_dtype,
        rows=sum(rows),
        shapes=[p.shape for p in specs],
        starts=starts,
        order=order.to(device),
        inverse=inverse.to(device),
        splits=splits,
        rank=state.rank,
        counts=tuple(int((part == state.rank).sum()) for part in owner.split(rows)),
    )


def feedback_arenas(block: int) -> dict[str, Callable[[State], Arena]]:
    """The residuals that error feedback keeps on both ends, for `State.lazy`."""

    def worker(state: State) -> Arena:
        return _arena(block, state, {p.key: _rows(p.numel, block) for p in state.params})

    def owner(state: State) -> Arena:
        first_block = cast("dict[str, int]", state.cache["first_block"])
        rows = {}
        for p in state.params:
            first, n = first_block[p.key], _rows(p.numel, block)
            rows[p.key] = len(range(first + (state.rank - first) % state.world_size, first + n, state.world_size))
        return _arena(block, state, rows)

    return {"residual": worker, "owner_residual": owner}


def feedback_covers(block: int) -> dict[str, Callable[[State, str], Cover]]:
    """Which elements those residuals stand for, for `State.undelivered`."""

    def worker(state: State, key: str) -> Cover:
        return Cover.whole(state.spec(key), block)

    def owner(state: State, key: str) -> Cover:
        p = state.spec(key)
        before = cast("dict[str, int]", state.cache["first_block"])[key]
        first = (state.rank - before) % state.world_size
        return Cover(p.name, p.start or 0, p.numel, first, state.world_size, block)

    return {"residual": worker, "owner_residual": owner}


def worker_residual(block: int, keys: Sequence[str], state: State) -> Tensor:
    """What this rank has not sent yet, ``[rows, block]`` in the order of `keys`."""
    return _residual("residual", block, keys, state)


def owner_residual(block: int, keys: Sequence[str], state: State) -> Tensor:
    """What this rank, as an owner, has not sent yet of the blocks it owns, ``[owned rows, block]``."""
    return _residual("owner_residual", block, keys, state)


def _residual(kind: str, block: int, keys: Sequence[str], state: State) -> Tensor:
    if kind not in state.arenas:
        state.declare()
    return state.arenas[kind].bind(keys).view(-1, block)


def _arena(block: int, state: State, rows: dict[str, int]) -> Arena:
    spec = state.params[0]
    return Arena({k: n * block for k, n in rows.items()}, spec.state_dtype, spec.device)
