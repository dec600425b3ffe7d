"""Matrices of a bucket and their thin factors: the products that low-rank compressors are made of.

Factors are kept as rows, ``[rank, n]`` and ``[rank, m]``: the products with a matrix then run along its rows, which
took a fifth of the time of the same products with ``[m, rank]`` on the CPU (rank 4).

On the CPU every matrix has a product of its own, which can write into the gradient directly, and for which the matrix
is often still in the cache; elsewhere the matrices of one shape are one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lightning_sync.compressors.random import generator
from lightning_sync.state import State

PIECE_BYTES = 2**20
"""Size of the pieces in which a matrix is updated and then multiplied on the CPU. Larger ones leave the cache in
between, smaller ones cost more in calls: measured from 64 KiB up, 1 MiB took a fifth less than whole matrices."""


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape, ``[n, m]``, in a bucket.

    Attributes:
        n: Rows.
        m: Columns.
        members: Their places in the bucket.
    """

    n: int
    m: int
    members: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.members)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a parameter with at least two axes: the first axis, and all others."""
    return shape[0], torch.Size(shape[1:]).numel()


def stacks_of(shapes: Sequence[tuple[int, ...]]) -> list[Stack]:
    """Parameters with these shapes, put together by the shape of their matrix."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, shape in enumerate(shapes):
        groups.setdefault(matrix_shape(shape), []).append(i)
    return [Stack(n, m, tuple(members)) for (n, m), members in groups.items()]


def split(flat: Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Cut a flat tensor into batches of matrices."""
    parts = flat.split([a * b * c for a, b, c in shapes])
    return [p.view(shape) for p, shape in zip(parts, shapes, strict=True)]


def add_(matrices: Tensor, gradients: Sequence[Tensor], share: float) -> None:
    """M += share G, in place: `matrices` are ``[c, n, m]``, `gradients` c tensors with the elements of ``[n, m]``."""
    parts = list(matrices.unbind(0))
    torch._foreach_add_(parts, [g.reshape(p.shape) for g, p in zip(gradients, parts, strict=True)], alpha=share)


def add_and_project(
    matrices: Tensor,
    gradients: Sequence[Tensor],
    share: float,
    right: Tensor,
    left: Tensor,
    *,
    subtract: bool = False,
) -> None:
    """M += share G, then P = M Q, and with `subtract` M -= P Q^T.

    Args:
        matrices: M, ``[c, n, m]``.
        gradients: G, c tensors with the elements of ``[n, m]``.
        share: Factor of G.
        right: Q as rows, ``[c, r, m]``.
        left: P as rows, ``[c, r, n]``, written.
        subtract: Whether to take P Q^T off M, in place.
    """
    n, m = matrices.shape[1:]
    if matrices.device.type != "cpu":
        add_(matrices, gradients, share)
        torch.bmm(right, matrices.mT, out=left)
        if subtract:
            subtract_product_(matrices, left, right)
        return
    rows = _piece_rows(m, matrices.element_size())
    for matrix, gradient, q, p in zip(matrices, gradients, right, left, strict=True):
        pieces = zip(matrix.split(rows), gradient.reshape(n, m).split(rows), p.split(rows, 1), strict=True)
        for piece, addend, out in pieces:
            piece.add_(addend, alpha=share)
            torch.mm(q, piece.mT, out=out)
            if subtract:
                piece.addmm_(out.mT, q, alpha=-1)


def project_back(matrices: Tensor, left: Tensor, right: Tensor, *, subtract: bool) -> None:
    """Q = M^T P and, with `subtract`, M -= P Q^T.

    Args:
        matrices: M, ``[c, n, m]``.
        left: P as rows, ``[c, r, n]``.
        right: Q as rows, ``[c, r, m]``, written.
        subtract: Whether to take P Q^T off M, in place.
    """
    if matrices.device.type != "cpu":
        torch.bmm(left, matrices, out=right)
        if subtract:
            subtract_product_(matrices, left, right)
        return
    for matrix, p, q in zip(matrices, left, right, strict=True):
        torch.mm(p, matrix, out=q)
        if subtract:
            matrix.addmm_(p.mT, q, alpha=-1)


def subtract_product_(matrices: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """M -= scale P Q^T, in place."""
    if matrices.device.type != "cpu":
        matrices.baddbmm_(left.mT, right, alpha=-scale)
        return
    for matrix, p, q in zip(matrices, left, right, strict=True):
        matrix.addmm_(p.mT, q, alpha=-scale)


def write_product(left: Tensor, right: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write P Q^T into c tensors, straight into those that are contiguous and of the factors' dtype (on the CPU)."""
    if left.device.type != "cpu":
        products = torch.bmm(left.mT, right).unbind(0)
        torch._foreach_copy_(list(tensors), [v.view(t.shape) for v, t in zip(products, tensors, strict=True)])
        return
    n, m = left.shape[2], right.shape[2]
    rows = _piece_rows(m, left.element_size())
    for p, q, tensor in zip(left, right, tensors, strict=True):
        direct = tensor.is_contiguous() and tensor.dtype == left.dtype
        product = tensor.view(n, m) if direct else p.new_empty(n, m)
        for piece, some in zip(product.split(rows), p.split(rows, 1), strict=True):
            torch.mm(some.mT, q, out=piece)
        if not direct:
            tensor.copy_(product.view(tensor.shape))


def _piece_rows(columns: int, itemsize: int) -> int:
    return max(1, PIECE_BYTES // max(1, columns * itemsize))


def bind_factor(kind: str, keys: Sequence[str], rank: int, state: State) -> tuple[Tensor, list[str]]:
    """The factors of a kind, one after the other; new ones are random, from the seed and their names.

    Returns:
        The flat tensor, and the keys that are new.
    """
    arena = state.arenas[kind]
    fresh = [k for k in keys if k not in arena]
    factor = arena.bind(keys)
    for key in fresh:
        arena[key].copy_(directions(rank, arena.sizes[key] // rank, state.seed, key, factor).reshape(-1))
    return factor, fresh


def fallback(side: str, rank: int, size: int, state: State, like: Tensor) -> Tensor:
    """Directions ``[size, rank]`` for columns that vanish, see `orthogonalise_`; made once."""
    cache_key = ("fallback", side, size)
    if cache_key not in state.cache:
        state.cache[cache_key] = directions(rank, size, state.seed, side, like).mT
    return cast(Tensor, state.cache[cache_key])


def directions(rank: int, size: int, seed: int, name: str, like: Tensor) -> Tensor:
    """A random ``[rank, size]`` matrix that depends on the seed and the name only (the same on all ranks)."""
    matrix = torch.randn(size, rank, generator=generator(seed, name), dtype=torch.float32).mT
    return matrix.to(device=like.device, dtype=like.dtype)


def orthogonalise_(columns: Tensor, fallback: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Make the columns of every matrix in a batch orthonormal, in place (modified Gram-Schmidt).

    Args:
        columns: ``[batch, n, r]``.
        fallback: ``[n, r]``; column j takes the place of a column j that is zero, or lies in the span of the columns
            before it (its norm fell by more than `tolerance`). Without it, a zero gradient would leave a zero factor,
            and the next step's P = M Q would be zero whatever M is.
        tolerance: Relative norm below which a column counts as dependent.

    On an accelerator the choice is a `torch.where`, without a synchronisation. More columns than rows cannot be
    orthonormal; the surplus is zero.
    """
    n, rank = columns.shape[-2:]
    before = torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    for j in range(min(rank, n)):
        column = columns[..., j : j + 1]
        norm = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        dependent = norm <= tolerance * before[..., j : j + 1]
        # On the CPU a look costs less than what it saves; elsewhere it would stop the host.
        if column.device.type != "cpu" or bool(dependent.any()):
            substitute = fallback[:, j : j + 1].expand_as(column)
            if j:
                done = columns[..., :j]
                substitute = substitute - done @ (done.mT @ substitute)
            column.copy_(torch.where(dependent, substitute, column))
            norm = torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        column.div_(norm.clamp_(min=torch.finfo(columns.dtype).tiny))
        rest = columns[..., j + 1 :]
        if rest.shape[-1]:
            rest.sub_(column @ (column.mT @ rest))
    if rank > n:
        columns[..., n:].zero_()
    return columns
