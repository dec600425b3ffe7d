"""Adasum: between the sum and the mean, by how much gradients agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.aggregators.base import Combination, ParameterAggregator, takes_part
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Payload

#: Square of the size, relative to its parts, below which a combination is rounding error of parts that cancel.
CANCELLED = 1e-14


@dataclass(frozen=True)
class Adasum(ParameterAggregator):
    r"""Adds up orthogonal gradients, averages parallel ones, per parameter.

    For two contributions to one parameter

    .. math:: \mathrm{Adasum}(a, b) = \Bigl(1 - \frac{a \cdot b}{2 \|a\|^2}\Bigr) a
              + \Bigl(1 - \frac{a \cdot b}{2 \|b\|^2}\Bigr) b

    and for more, that of two halves, each reduced in the same way (Maleki et al. 2020, "Scaling distributed training
    with adaptive summation", arXiv 2006.02924; Horovod's operator). The factor of a contribution that is zero (or a
    combination that cancels to less than 1e-7 of its parts) is 1, as in Horovod.

    Pairs: in every round, neighbours in rank order; where their number is odd, the last one goes on to the next round
    as it is. For powers of two these are Horovod's pairs (it takes no other numbers). The result depends on the order.

    So N ranks whose gradients agree take one rank's step, and N whose gradients are orthogonal take N: keep the
    learning rate of one rank, instead of scaling it with N. For optimisers other than SGD it belongs on the deltas
    after a local step, as in Horovod: ``HybridStrategy(sync_every=1, aggregator="adasum")``. All ranks count alike,
    whatever their shares.

    Whatever N is, this takes one round: all of it follows from the dot products of the contributions, N (N+1) / 2
    numbers in float64 per parameter, which are summed over the owners of its blocks.
    """

    @override
    def reduce(self, rows: Tensor, shares: Tensor, counts: Sequence[int]) -> Combination:
        ranks = takes_part(shares)
        if len(ranks) < len(rows):
            rows = torch.stack([rows[rank] for rank in ranks])
        scales = rows.new_empty(len(ranks), dtype=torch.float64)
        for place, rank in enumerate(ranks):  # filled one by one: a copy to the device would stop the host
            scales[place] = 1 / float(shares[rank])
        if len(ranks) == 1:
            return rows[0] * scales[0]
        upper = torch.triu_indices(len(ranks), len(ranks), device=rows.device)
        summed = yield Payload("sum", (gram(rows, counts)[:, upper[0], upper[1]],))
        products = rows.new_zeros(len(counts), len(ranks), len(ranks), dtype=torch.float64)
        products[:, upper[0], upper[1]] = products[:, upper[1], upper[0]] = summed.tensors[0]
        products *= scales[:, None] * scales
        factors = (adasum_factors(products) * scales).to(rows.dtype)
        combined = torch.empty_like(rows[0])
        for k, start, stop in _segments(counts):
            torch.mm(factors[k : k + 1], rows[:, start:stop].flatten(1), out=combined[start:stop].view(1, -1))
        return combined

    @override
    def wire_bytes(self, parameters: int, topology: Topology) -> Bytes:
        return topology.all_reduce(parameters * topology.size * (topology.size + 1) // 2 * 8)


def adasum_factors(products: Tensor) -> Tensor:
    r"""Factors :math:`c_r` with :math:`\mathrm{Adasum}(g_1, ..., g_N) = \sum_r c_r g_r`, from all dot products.

    Args:
        products: ``[parameters, N, N]``, float64: the Gram matrices :math:`G_{rs} = g_r \cdot g_s`.

    Returns:
        ``[parameters, N]``. A combination with factors c has the square norm c G c, and two have the product c G c'.
    """
    size = products.shape[-1]
    vectors = torch.eye(size, dtype=products.dtype, device=products.device)
    vectors = vectors[:, None].expand(size, len(products), size)  # [contributions, parameters, N]
    while len(vectors) > 1:
        even = len(vectors) // 2 * 2
        a, b = vectors[0:even:2], vectors[1:even:2]
        dot = _product(a, products, b)
        pairs = _factor(a, dot, products) * a + _factor(b, dot, products) * b
        vectors = torch.cat([pairs, vectors[even:]])
    return vectors[0]


def _factor(a: Tensor, dot: Tensor, products: Tensor) -> Tensor:
    square, parts = _product(a, products, a), _product(a.abs(), products.abs(), a.abs())
    return torch.where(square <= CANCELLED * parts, 1.0, 1 - dot / (2 * square))


def _product(a: Tensor, products: Tensor, b: Tensor) -> Tensor:
    """Compute c G c' for every pair and parameter, ``[pairs, parameters, 1]``."""
    return ((a.unsqueeze(-2) @ products).squeeze(-2) * b).sum(-1, keepdim=True)


def gram(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Dot products of rows ``[N, blocks, block]`` per parameter, in float64: ``[parameters, N, N]``.

    In double precision, since what is left of two rows that nearly cancel is the difference of their products. Rows are
    widened piece by piece on the CPU, in the cache: a whole copy would take five times as long.
    """
    products = rows.new_zeros(len(counts), len(rows), len(rows), dtype=torch.float64)
    piece = max(1, 2**17 // len(rows)) if rows.device.type == "cpu" else max(1, rows[0].numel())
    for k, start, stop in _segments(counts):
        for part in rows[:, start:stop].flatten(1).split(piece, dim=1):
            wide = part.double()
            products[k].addmm_(wide, wide.mT)
    return products


def _segments(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Place of every parameter that has blocks here, its first block, and the one after its last.

    A loop over parameters, not elements: each has a matrix product of its own length.
    """
    ends = accumulate(counts, initial=0)
    yield from ((k, start, stop) for k, (start, stop) in enumerate(pairwise(ends)) if stop > start)
