"""Small problems that the simulated world can learn on a laptop: losses with known minima and noisy gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log10

import torch
from torch import Tensor

from lightning_sync.checks import check_integer, check_positive


class Problem(ABC):
    """A loss of `[n]` parameters, in float32."""

    batch: int = 1
    """Samples per step."""

    @abstractmethod
    def start(self) -> Tensor:
        """Where training begins, `[n]`."""

    @abstractmethod
    def gradient(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """A noisy gradient at `values`, `[n]`, with the replica's generator."""

    @abstractmethod
    def loss(self, values: Tensor) -> float:
        """The loss that is reported."""


class Nothing(Problem):
    """Nothing to learn: for times only.

    Args:
        size: n.
    """

    def __init__(self, size: int = 1) -> None:
        self._zeros = torch.zeros(size)

    def start(self) -> Tensor:
        """Zeros."""
        return self._zeros.clone()

    def gradient(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Zeros."""
        return self._zeros

    def loss(self, values: Tensor) -> float:
        """0."""
        return 0.0


class Quadratic(Problem):
    r"""A bowl, :math:`f(x) = \frac12 \sum_i h_i x_i^2`, with curvatures spread evenly on a logarithmic scale.

    Args:
        size: n.
        least: Smallest curvature.
        largest: Largest curvature.
        noise: Standard deviation of each element of a gradient.
    """

    def __init__(self, size: int = 32, least: float = 0.01, largest: float = 1.0, noise: float = 0.1) -> None:
        check_integer("Quadratic", 1, size=size)
        check_positive("Quadratic", least=least, largest=largest)
        self._size, self._noise = size, noise
        self._curvature = torch.logspace(log10(least), log10(largest), size)

    def start(self) -> Tensor:
        """Ones."""
        return torch.ones(self._size)

    def gradient(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """H x + noise."""
        return self._curvature * values + self._noise * torch.randn(self._size, generator=generator)

    def loss(self, values: Tensor) -> float:
        """F(x), without noise."""
        return float(0.5 * (self._curvature * values * values).sum())


class Logistic(Problem):
    """Logistic regression of labels drawn from a logistic model; the loss is the mean over all samples.

    Args:
        features: Number of features, and n.
        samples: Number of samples.
        batch: Samples per step, drawn with replacement.
        seed: Of the data.
    """

    def __init__(self, features: int = 20, samples: int = 4096, batch: int = 16, seed: int = 0) -> None:
        check_integer("Logistic", 1, features=features, samples=samples, batch=batch)
        generator = torch.Generator().manual_seed(seed)
        scale = torch.logspace(0, -1, features)  # badly scaled features make momentum worth having
        self._x = torch.randn(samples, features, generator=generator) * scale
        truth = 3 * torch.randn(features, generator=generator)
        self._y = torch.bernoulli(torch.sigmoid(self._x @ truth), generator=generator)
        self.batch = batch

    def start(self) -> Tensor:
        """Zeros."""
        return torch.zeros(self._x.shape[1])

    def gradient(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Of a random batch."""
        rows = torch.randint(len(self._x), (self.batch,), generator=generator)
        x = self._x[rows]
        return x.T @ (torch.sigmoid(x @ values) - self._y[rows]) / self.batch

    def loss(self, values: Tensor) -> float:
        """Mean cross-entropy over all samples, in nats."""
        return float(torch.nn.functional.binary_cross_entropy_with_logits(self._x @ values, self._y))
