"""The checks behind `lightning_sync.testing.check_aggregator`, one promise each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sync.aggregators.base import Aggregator
from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor
from lightning_sync.compressors.feedback import ErrorFeedback
from lightning_sync.compressors.integers import BlockInt8
from lightning_sync.compressors.plain import PlainBlocks
from lightning_sync.contract import LAYOUTS, payload_bytes, require
from lightning_sync.state import ParamSpec

Reference = Callable[[Tensor, Tensor], Tensor]
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
ELEMENTS = 37
SHAPES = {"matrix": (9, 40), "vector": (33,), "scalar": (), "empty": (0, 5), "convolution": (8, 3, 3, 3)}


@dataclass(frozen=True)
class Ranks:
    """An aggregator and N ranks' random contributions, of which some may have a share of 0."""

    aggregator: Aggregator
    shares: tuple[float, ...]
    seed: int

    def contributions(self, dtype: torch.dtype, elements: int = ELEMENTS) -> Tensor:
        """What the ranks mean to send, ``[N, elements]``."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(len(self.shares), elements, generator=generator, dtype=torch.float64).to(dtype)

    def combined(self, contributions: Tensor, shares: Sequence[float] | None = None) -> Tensor:
        """The result for these contributions, the gain included."""
        weights = torch.tensor(self.shares if shares is None else shares, dtype=torch.float64)
        rows = contributions * weights.to(contributions.dtype)[:, None]
        return self.aggregator.combine(rows, weights) * self.aggregator.gain(weights)

    @property
    def present(self) -> list[int]:
        """The ranks that take part."""
        return [rank for rank, share in enumerate(self.shares) if share > 0]

    def fail(self, ok: bool, text: str) -> None:
        """Raise AssertionError with `text` unless `ok`."""
        require(ok, f"{self.aggregator!r}, shares {self.shares}: {text}")


def shares_to_try(size: int) -> list[tuple[float, ...]]:
    """Equal ones, unequal ones, and some of which one is 0."""
    found = [(1 / size,) * size]
    if size > 1:
        weights = [1 + rank for rank in range(size)]
        found.append(tuple(w / sum(weights) for w in weights))
        for absent in (0, size - 1):
            weights = [0 if rank == absent else 1 for rank in range(size)]
            found.append(tuple(w / sum(weights) for w in weights))
    return found


def check_shape(ranks: Ranks) -> None:
    """One row comes out, of the dtype that went in, always the same; zeros give zeros."""
    for dtype in TOLERANCES:
        contributions = ranks.contributions(dtype)
        first, second = ranks.combined(contributions), ranks.combined(contributions)
        ranks.fail(
            first.shape == (ELEMENTS,) and first.dtype == dtype,
            f"rows [{len(contributions)}, {ELEMENTS}] of {dtype} became {tuple(first.shape)} of {first.dtype}.",
        )
        ranks.fail(torch.equal(first, second), "the same rows and shares gave other bits.")
    ranks.fail(ranks.combined(ranks.contributions(torch.float32, 0)).shape == (0,), "rows without elements failed.")
    zeros = ranks.combined(torch.zeros(len(ranks.shares), ELEMENTS))
    ranks.fail(bool((zeros == 0).all()), "zeros became something else; the padding of parameters is zeros.")


def check_reference(ranks: Ranks, reference: Reference) -> None:
    """The result is that of a reference in float64 over the contributions of those that take part."""
    for dtype, tolerance in TOLERANCES.items():
        contributions = ranks.contributions(dtype)
        present = contributions[ranks.present].double()
        shares = torch.tensor([ranks.shares[r] for r in ranks.present], dtype=torch.float64)
        expected = reference(present, shares)
        error = distance(ranks.combined(contributions), expected)
        ranks.fail(error <= tolerance, f"in {dtype} the result is {error:.2g} of its maximum off the reference.")


def check_equal(ranks: Ranks) -> None:
    """Equal contributions return themselves, whatever the shares."""
    for dtype, tolerance in TOLERANCES.items():
        one = ranks.contributions(dtype)[:1]
        error = distance(ranks.combined(one.expand(len(ranks.shares), -1)), one[0])
        ranks.fail(error <= tolerance, f"equal contributions came back {error:.2g} of their maximum off.")


def check_absent(ranks: Ranks) -> None:
    """A rank of share 0 is left out, and not counted as zeros."""
    for dtype, tolerance in TOLERANCES.items():
        contributions = ranks.contributions(dtype)
        shares = [ranks.shares[r] for r in ranks.present]
        expected = ranks.combined(contributions[ranks.present], shares)
        weights = torch.tensor(ranks.shares, dtype=torch.float64)
        rows = contributions * weights.to(dtype)[:, None]
        if not ranks.aggregator.linear:  # a sum adds up what such a rank owes; others must not even look
            rows[weights == 0] = float("nan")
        result = ranks.aggregator.combine(rows, weights) * ranks.aggregator.gain(weights)
        error = distance(result, expected)
        ranks.fail(error <= tolerance, f"without the ranks of share 0 the result would be {error:.2g} off this one.")


def check_order(ranks: Ranks) -> None:
    """The order of ranks does not matter."""
    for dtype, tolerance in TOLERANCES.items():
        contributions = ranks.contributions(dtype)
        order = torch.randperm(len(ranks.shares), generator=torch.Generator().manual_seed(ranks.seed)).tolist()
        turned = ranks.combined(contributions[order], [ranks.shares[r] for r in order])
        error = distance(turned, ranks.combined(contributions))
        ranks.fail(error <= tolerance, f"in another order of ranks the result is {error:.2g} of its maximum off.")


def check_coordinates(ranks: Ranks) -> None:
    """An element depends on that element alone."""
    if not ranks.aggregator.coordinate_wise:
        return
    contributions = ranks.contributions(torch.float64)
    whole, half = ranks.combined(contributions), ranks.combined(contributions[:, ::2].contiguous())
    ranks.fail(
        distance(half, whole[::2]) <= 1e-9,
        "elements influence each other. Set coordinate_wise=False and implement ParameterAggregator.reduce.",
    )


def check_nan(ranks: Ranks) -> None:
    """NaN stays visible."""
    for rank in ranks.present:
        contributions = ranks.contributions(torch.float32)
        contributions[rank, 1] = float("nan")
        result = ranks.combined(contributions)
        ranks.fail(not bool(result[1].isfinite()), f"NaN in the contribution of rank {rank} came out finite.")


EVERY: tuple[Callable[[Ranks], None], ...] = (check_shape, check_absent, check_coordinates, check_nan)
"""The checks that need no options."""


def check_exchange(aggregator: Aggregator, size: int, seed: int) -> None:
    """Through the exchange every parameter becomes what `combine` makes of it, and bytes are the predicted ones."""
    for dtype, tolerance in TOLERANCES.items():
        specs = tuple(ParamSpec(name, shape, dtype, torch.device("cpu")) for name, shape in SHAPES.items())
        for shares in shares_to_try(size):
            ranks = Ranks(aggregator, shares, seed)
            generator = torch.Generator().manual_seed(seed)
            mine = [
                [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) for p in specs]
                for _ in shares
            ]
            for bucket in (list(range(len(specs))), list(reversed(range(1, len(specs))))):
                world = _world(PlainBlocks(), specs, ranks)
                results = world.reduce([[g[i] for i in bucket] for g in mine], [specs[i].key for i in bucket])
                for place, i in enumerate(bucket):
                    rows = torch.stack([g[i].reshape(-1) for g in mine])
                    expected = ranks.combined(rows).view(specs[i].shape)
                    for other in results:
                        ranks.fail(torch.equal(other[place], results[0][place]), "ranks got different bits.")
                    error = distance(results[0][place], expected)
                    ranks.fail(
                        error <= tolerance,
                        f"parameter {specs[i].key!r} came out of the exchange {error:.2g} of its maximum off what "
                        "combine makes of it alone.",
                    )


def check_bytes(aggregator: Aggregator, size: int, seed: int) -> None:
    """Predicted bytes are the counted ones, and all ranks take part in the same rounds."""
    specs = tuple(ParamSpec(n, s, torch.float32, torch.device("cpu")) for n, s in SHAPES.items())
    ranks = Ranks(aggregator, (1 / size,) * size, seed)
    for codec in (PlainBlocks(), BlockInt8(8), ErrorFeedback(BlockInt8(8))):
        world = _world(codec, specs, ranks)
        world.reduce([[torch.ones(p.shape) for p in specs]] * size)
        for nodes in LAYOUTS[size]:
            for rank in range(size):
                topology = Topology(rank, nodes)
                counted = sum((payload_bytes(sent[rank], topology) for sent in world.sent), Bytes())
                predicted = codec.wire_bytes(specs, topology) + aggregator.wire_bytes(len(specs), topology)
                ranks.fail(
                    counted == predicted, f"over {codec!r}, {predicted} is predicted, the wire counts {counted}."
                )


def _world(compressor: Compressor, specs: Sequence[ParamSpec], ranks: Ranks) -> SimulatedWorld:
    world = SimulatedWorld(compressor, specs, len(ranks.shares), record=True, aggregator=ranks.aggregator)
    world.set_shares(ranks.shares)
    return world


def distance(value: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest element of the reference; NaN counts as infinitely far."""
    if not value.numel():
        return 0.0
    error = (value.double() - reference.double()).abs().max() / reference.double().abs().max().clamp(min=1e-30)
    return float(error.nan_to_num(nan=float("inf")))
