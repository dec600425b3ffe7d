"""Parameters cut into blocks, and the two-phase reduction of encoded blocks.

Quantised values cannot be added up on the wire (an int8 sum wraps round), so every block has an *owner*: all ranks
send it their encoded version, the owner decodes all N, combines them, encodes the result and sends it to all. Each
rank sends 2 (N-1)/N of the payload, whatever N is, as a ring all-reduce does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.state import Arena, Cover, ParamSpec, State


class BlockCodec(Compressor):
    """A compressor that encodes blocks of `block` elements, each on its own.

    Subclasses are frozen dataclasses with a field or attribute `block` and three methods. Blocks do not cross
    parameters; the last block of a parameter is padded with zeros. The owner of a block is its index, counted over
    all parameters in registration order, modulo N: it depends neither on DDP's buckets nor on what else is sent.
    """

    block: int
    aggregates = True
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
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        plan = block_plan(self.block, keys, state)
        blocks = torch.zeros(plan.rows, self.block, dtype=plan.dtype, device=tensors[0].device)
        torch._foreach_add_(plan.views(blocks), list(tensors), alpha=state.share)
        owned = yield plan.exchange(self.encode(blocks))
        combined = yield from state.aggregate(self.decode(owned.tensors, plan.dtype), plan.counts)
        everything = yield plan.gather(self.encode(combined))
        return plan.write(self.decode(plan.restore(everything.tensors), plan.dtype), tensors)

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        rows = sum(_rows(p.numel, self.block) for p in params)
        owned = [owned_rows(rows, rank, topology.size) * self.row_bytes() for rank in range(topology.size)]
        return topology.all_to_all(owned) + topology.all_gather(owned[topology.rank])


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
