"""What the aggregators compute, straight from the papers' formulas: `[M, n]` contributions in float64 become `[n]`."""

import math

import torch
from torch import Tensor


def adasum_of_two(a: Tensor, b: Tensor) -> Tensor:
    """Maleki et al. 2020, for two gradients; Horovod's factor 1 where one of them is zero."""
    dot = torch.dot(a, b)
    left = 1 - dot / (2 * torch.dot(a, a)) if bool(a.any()) else 1.0
    right = 1 - dot / (2 * torch.dot(b, b)) if bool(b.any()) else 1.0
    return left * a + right * b


def adasum(contributions: Tensor, shares: Tensor | None = None) -> Tensor:
    """Neighbours in pairs, the last of an odd number as it is, until one is left."""
    vectors = list(contributions.double())
    while len(vectors) > 1:
        pairs = [adasum_of_two(vectors[i], vectors[i + 1]) for i in range(0, len(vectors) - 1, 2)]
        vectors = pairs + vectors[len(pairs) * 2 :]
    return vectors[0]


def adasum_of_halves(contributions: Tensor) -> Tensor:
    """The paper's recursion for powers of two: Adasum of the first half and of the second."""
    size = len(contributions)
    if size == 1:
        return contributions[0]
    return adasum_of_two(adasum_of_halves(contributions[: size // 2]), adasum_of_halves(contributions[size // 2 :]))


def mean(contributions: Tensor, shares: Tensor) -> Tensor:
    return (shares[:, None] * contributions).sum(0)


def total(contributions: Tensor, shares: Tensor) -> Tensor:
    return mean(contributions, shares) * len(shares)


def median(contributions: Tensor, shares: Tensor) -> Tensor:
    return contributions.quantile(0.5, dim=0, interpolation="midpoint")


def trimmed_mean(fraction: float) -> object:
    def reference(contributions: Tensor, shares: Tensor) -> Tensor:
        size = len(contributions)
        out = min(math.ceil(round(fraction * size, 6)), (size - 1) // 2)
        return contributions.sort(0).values[out : size - out].mean(0)

    return reference


def majority_vote(contributions: Tensor, shares: Tensor) -> Tensor:
    return ((contributions > 0).sum(0) - (contributions < 0).sum(0)).sign().double()
