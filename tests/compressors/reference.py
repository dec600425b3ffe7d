"""The two-phase reduction with residuals at both ends, in float64, block by block, as its equations say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import Compressor
from lightning_sync.testing import make_specs

Quantise = Callable[[np.ndarray], np.ndarray]


@dataclass
class TwoPhase:
    """One parameter reduced by N ranks and the owners of its blocks (Tang et al. 2019, DoubleSqueeze).

    Attributes:
        quantise: C, of one block.
        block: Elements of a block.
        ranks: N.
        feedback: Whether anything is kept.
    """

    quantise: Quantise
    block: int
    ranks: int
    feedback: bool
    errors: list[np.ndarray] = field(default_factory=list)
    late: np.ndarray | None = None

    def compress(self, flat: np.ndarray) -> np.ndarray:
        """C of every block; what follows the last element is no element."""
        padded = np.concatenate([flat, np.zeros(-flat.size % self.block)]).reshape(-1, self.block)
        return np.concatenate([np.zeros(0), *(self.quantise(row) for row in padded)])[: flat.size]

    def step(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """What every rank gets."""
        meant = [g.ravel() / self.ranks for g in gradients]
        if self.feedback and self.late is not None:
            meant = [e + x for e, x in zip(self.errors, meant, strict=True)]
        sent = [self.compress(x) for x in meant]
        self.errors = [x - c for x, c in zip(meant, sent, strict=True)]
        total = np.sum(sent, 0)
        if self.feedback and self.late is not None:
            total = total + self.late
        result = self.compress(total)
        self.late = total - result
        return result.reshape(gradients[0].shape)


def runs_like_the_reference(
    compressor: Compressor,
    quantise: Quantise,
    *,
    block: int,
    feedback: bool,
    ranks: int,
    sizes: Sequence[int],
    steps: int = 6,
    seed: int = 0,
    tolerance: float = 1e-9,
) -> None:
    """Assert that all ranks get what the reference gives, step after step, for parameters of these sizes at once."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"p{i}" for i in range(len(sizes))]
    world = SimulatedWorld(
        compressor, make_specs({n: (s,) for n, s in zip(names, sizes, strict=True)}, torch.float64), ranks
    )
    references = [TwoPhase(quantise, block, ranks, feedback) for _ in sizes]
    for step in range(steps):
        gradients = [
            [torch.randn(s, generator=generator, dtype=torch.float64) * 10**r for s in sizes] for r in range(ranks)
        ]
        results = world.reduce(gradients)
        # Contributions may cancel: what is rounded is the size of the largest.
        largest = [
            max(float(mine[i].abs().max()) / ranks if s else 0.0 for mine in gradients) for i, s in enumerate(sizes)
        ]
        for i, reference in enumerate(references):
            expected = reference.step([mine[i].numpy() for mine in gradients])
            for mine in results:
                scale = max(np.abs(expected).max(initial=0), largest[i])
                np.testing.assert_allclose(
                    mine[i].numpy(),
                    expected,
                    rtol=tolerance,
                    atol=tolerance * scale,
                    err_msg=f"{names[i]}, step {step}",
                )
