"""Low-rank gradients with one reduction a step: ACP-SGD, which sends the two factors in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.checks import check_integer, check_positive
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.exact import Exact
from lightning_sync.compressors.finite import finite_rows, forget_
from lightning_sync.compressors.flat import as_flat
from lightning_sync.compressors.lowrank import (
    Stack,
    add_,
    add_and_project,
    bind_factor,
    fallback,
    matrix_shape,
    orthogonalise_,
    project_back,
    split,
    stacks_of,
    write_product,
)
from lightning_sync.state import Cover, ParamSpec, State


@dataclass(frozen=True)
class AcpSGD(Compressor):
    r"""PowerSGD's two factors in turn, one reduction a step (Zhang et al. 2023, ACP-SGD).

    A gradient of shape ``[n, ...]`` is a matrix of n rows and m columns. With e_r the residual of rank r in units of
    the mean, w_r its share (1/N), and :math:`M_r = e_r + w_r G_r`, one step is

    .. math::
        Q \leftarrow \mathrm{orth}(Q), \quad P_r = M_r Q, \quad e_r \leftarrow M_r - P_r Q^\top, \quad
        P = \textstyle\sum_r P_r \quad\text{(all-reduce)}, \quad \hat G = P Q^\top

    and the next one, with the P of this one,

    .. math::
        P \leftarrow \mathrm{orth}(P), \quad Q_r = M_r^\top P, \quad e_r \leftarrow M_r - P Q_r^\top, \quad
        Q = \textstyle\sum_r Q_r \quad\text{(all-reduce)}, \quad \hat G = P Q^\top .

    So each step needs half of PowerSGD's bytes, and no reduction waits for another of the same step; the subspace moves
    half as fast. Each parameter counts its own turns, so that steps between two exchanges do not matter. Residuals plus
    everything delivered equal the true sum.

    Payload: ``4 * rank * n`` and ``4 * rank * m`` bytes per matrix in turn, ``2 * rank * (n + m)`` on average, in one
    all-reduce (pattern ``"sum"``), flat in the number of ranks and in ranks per node. Memory: one float32 per element
    (residual) and ``rank * (n + m)`` (factors). Parameters with fewer than two axes, and matrices of which a factor
    would not be `min_ratio` times smaller, travel exactly. Columns that vanish are replaced by fixed directions. A
    matrix with inf or NaN makes this step's result non-finite and starts afresh. Biased, with a feedback of its own.

    Args:
        rank: Columns of a factor. Lower: fewer bytes and less work, more of the gradient late. For another rank by
            parameter use a `Route`.
        warmup_steps: Steps that send everything uncompressed first, as early gradients change direction quickly.
        min_ratio: Smallest saving, in either turn, for which a matrix is factored. Larger: more matrices travel
            exactly.

    Raises:
        ValueError: for a value out of range.
    """

    rank: int = 4
    warmup_steps: int = 300
    min_ratio: float = 2.0
    alignment = None

    def __post_init__(self) -> None:
        check_integer("AcpSGD", 1, rank=self.rank)
        check_integer("AcpSGD", 0, warmup_steps=self.warmup_steps)
        check_positive("AcpSGD", min_ratio=self.min_ratio)
        if self.min_ratio < 1:
            raise ValueError(f"AcpSGD(min_ratio={self.min_ratio!r}): must be at least 1.")

    @override
    def accepts(self, param: ParamSpec) -> bool:
        if len(param.shape) < 2 or param.numel == 0:
            return False
        return param.numel >= self.min_ratio * self.rank * max(matrix_shape(param.shape))

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        state = State(tuple(params))
        if params:
            dtype, device = params[0].state_dtype, params[0].device
            state.arena("residual", {p.key: p.numel for p in params}, dtype, device)
            for axis, kind in enumerate(("left", "right")):
                sizes = {p.key: self.rank * matrix_shape(p.shape)[axis] for p in params}
                state.arena(kind, sizes, dtype, device)
            # On the CPU, so that nobody has to ask the device whose turn it is.
            state.arena("turn", {p.key: 1 for p in params}, torch.float32, torch.device("cpu"))
            state.undelivered["residual"] = lambda own, key: Cover.whole(own.spec(key))
        return state

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        if state.step < self.warmup_steps:
            return (yield from Exact().reduce(keys, tensors, state))
        _, fresh = bind_factor("right", keys, self.rank, state)
        turns = state.arenas["turn"].bind(keys)
        for key in fresh:
            state.arenas["turn"][key].fill_(self._turn(state.step))
        stacks = self._stacks(keys, tuple(int(t) for t in turns.tolist()), state)
        order = [keys[i] for stack, _ in stacks for i in stack.members]
        matrices = split(state.arenas["residual"].bind(order), [(s.count, s.n, s.m) for s, _ in stacks])
        lefts = split(bind_factor("left", order, self.rank, state)[0], [(s.count, self.rank, s.n) for s, _ in stacks])
        rights = split(state.arenas["right"].bind(order), [(s.count, self.rank, s.m) for s, _ in stacks])
        members = [[tensors[i] for i in s.members] for s, _ in stacks]
        work = list(zip(stacks, matrices, lefts, rights, members, strict=True))

        for (stack, turn), matrix, left, right, own in work:
            if turn == 0:
                orthogonalise_(right.mT, fallback("right", self.rank, stack.m, state, right))
                add_and_project(matrix, own, state.share, right, left, subtract=True)
            else:
                orthogonalise_(left.mT, fallback("left", self.rank, stack.n, state, left))
                add_(matrix, own, state.share)
                project_back(matrix, left, right, subtract=True)
        sent = [right if turn else left for (_, turn), _, left, right, _ in work]
        flat = as_flat(sent)
        yield Payload("sum", tuple(sent) if flat is None else (flat,))
        for (_, matrix, left, right, own), factor in zip(work, sent, strict=True):
            write_product(left, right, own)
            # The reduced factor is the same on all ranks, so all forget the same matrices.
            sound = finite_rows(factor)
            forget_(matrix, sound)
            forget_(factor, sound)
        state.arenas["turn"].bind(keys).neg_().add_(1)
        return tensors

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        """As in `Compressor`; step `None`: the mean of the two turns. Exact where steps are counted one by one."""
        if step is not None and step < self.warmup_steps:
            return Exact().wire_bytes(params, topology)
        n, m = (sum(matrix_shape(p.shape)[axis] * p.state_dtype.itemsize for p in params) for axis in (0, 1))
        costs = [topology.all_reduce(self.rank * n), topology.all_reduce(self.rank * m)]
        if step is not None:
            return costs[self._turn(step)]
        return Bytes(*(Fraction(getattr(costs[0], f) + getattr(costs[1], f), 2) for f in ("sent", "network")))

    def _turn(self, step: int) -> int:
        """Whose turn a parameter begins with: 0 for P, 1 for Q."""
        return (step - self.warmup_steps) % 2

    def _stacks(self, keys: Sequence[str], turns: tuple[int, ...], state: State) -> list[tuple[Stack, int]]:
        """The bucket's matrices by turn and shape."""
        cache_key = ("stacks", tuple(keys), turns)
        if cache_key not in state.cache:
            made = []
            for turn in sorted(set(turns)):
                places = [i for i, t in enumerate(turns) if t == turn]
                for stack in stacks_of([state.spec(keys[i]).shape for i in places]):
                    made.append((replace(stack, members=tuple(places[i] for i in stack.members)), turn))
            state.cache[cache_key] = made
        return cast("list[tuple[Stack, int]]", state.cache[cache_key])
