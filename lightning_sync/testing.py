"""Contract checks for compressors and aggregators: run them on your own, without a process group.

Example:
    A whole test module for a compressor and an aggregator of another package::

        from lightning_sync.testing import check_aggregator, check_compressor

        def test_my_compressor():
            check_compressor(MyCompressor(ratio=0.1))

        def test_my_aggregator():
            check_aggregator(MyAggregator())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from lightning_sync import aggregator_contract
from lightning_sync.aggregator_contract import Ranks, shares_to_try
from lightning_sync.aggregators.base import Aggregator
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors.base import Compressor
from lightning_sync.compressors.blocks import BlockCodec
from lightning_sync.contract import (
    EVERY,
    LATE,
    LAYOUTS,
    Bench,
    check_buckets,
    check_dataclass,
    check_telescoping,
    check_units,
    make_specs,
    require,
    undelivered,
)

__all__ = ["SHAPES", "check_aggregator", "check_compressor", "make_specs", "undelivered"]

SHAPES: Mapping[str, tuple[int, ...]] = {
    "matrix": (48, 40),
    "wide": (8, 200),
    "tall": (301, 6),
    "convolution": (16, 8, 3, 3),
    "vector": (300,),
    "one element": (1,),
    "scalar": (),
    "empty": (0, 5),
}
"""The shapes that `check_compressor` tries; those that the compressor does not accept are left out."""


def check_compressor(
    compressor: Compressor,
    *,
    shapes: Mapping[str, Sequence[int]] = SHAPES,
    world_sizes: Iterable[int] = (1, 2, 3, 4),
    telescopes: bool = True,
    bitwise_buckets: bool | None = None,
    seed: int = 0,
) -> None:
    """Check the whole compressor contract between simulated ranks, in one process, in a few seconds.

    Checked, before and after a warm-up if there is one:

    * it is a frozen dataclass that can be copied;
    * shapes and dtypes are kept (float32, bfloat16, float64; empty tensors, one element, slices where it has an
      `alignment`), and all ranks get the same bits;
    * the result is in units of the mean, whatever the number of ranks;
    * zeros stay zeros, and do not spoil what comes after; inf and NaN stay visible (in the result, in a
      residual that will be sent later, or as an `OverflowError`), unless in an element that is neither sent nor kept;
    * strides do not matter; the same inputs and state give the same payloads;
    * `wire_bytes` is what a counted wire counts, on every rank, for several layouts of nodes;
    * with error feedback, all that was delivered plus what is kept is the true sum;
    * `State.state_dict` and `load_state_dict` restore everything, so that a resumed run has the same bits;
    * how parameters are put into buckets changes nothing;
    * what happens inside `State.held` leaves no trace.

    Args:
        compressor: What to check, with its options.
        shapes: Parameters by name. Add large ones if the compressor accepts none of the defaults.
        world_sizes: Numbers of ranks to try, each from 1 to 4.
        telescopes: Whether delivered plus residuals equal the true sum; False for residuals that decay.
        bitwise_buckets: Whether a parameter's result has the same bits in every bucket. `None`: for codecs of blocks
            (and their error feedback) yes, for others to 1e-4 of the largest element, since products and sums of
            other sizes may round differently.
        seed: Seed of the random gradients.

    Raises:
        AssertionError: with a sentence that says what is broken, and for which number of ranks.
    """
    check_dataclass(compressor)
    sizes = tuple(world_sizes)
    if not sizes or not all(n in LAYOUTS for n in sizes):
        raise ValueError(f"world_sizes={sizes!r}: expected numbers from 1 to 4.")
    accepted = {p.name: p.shape for p in make_specs(shapes) if compressor.accepts(p)}
    require(bool(accepted), f"{compressor!r} accepts none of the shapes {dict(shapes)}; pass some that it compresses.")
    if bitwise_buckets is None:
        bitwise_buckets = isinstance(getattr(compressor, "inner", compressor), BlockCodec)
    probe = make_specs(accepted)
    topology = Topology(0, (0, 1))
    warms_up = compressor.wire_bytes(probe, topology, 0) != compressor.wire_bytes(probe, topology, None)
    for step in (0, LATE) if warms_up else (0,):
        check_units(compressor, accepted, step, seed)
        for n in sizes:
            bench = Bench(compressor, accepted, n, step, seed)
            for check in EVERY:
                check(bench)
            check_buckets(bench, bitwise_buckets)
            if telescopes:
                check_telescoping(bench)


def check_aggregator(
    aggregator: Aggregator,
    *,
    reference: Callable[[Tensor, Tensor], Tensor] | None = None,
    symmetric: bool = True,
    keeps_equal: bool = True,
    sizes: Iterable[int] = (1, 2, 3, 4, 5, 8),
    seed: int = 0,
) -> None:
    """Check the whole aggregator contract in one process, in a second or two.

    Checked for float32 and float64, with equal and unequal shares, and with ranks of share 0:

    * it is a frozen dataclass that can be copied;
    * rows ``[N, n]`` become ``[n]`` of the same dtype, the same bits for the same input; zeros stay zeros;
    * ranks of share 0 are left out, whatever their rows hold, and not counted as zeros;
    * NaN of a rank that takes part stays visible; elements do not influence each other (unless `coordinate_wise` is
      False);
    * between 2, 3 and 4 simulated ranks, every parameter of a bucket becomes what `combine` makes of it alone, the same
      bits on all ranks, and `wire_bytes` is what a counted wire counts, uncompressed and compressed.

    Args:
        aggregator: What to check, with its options.
        reference: What it computes, in plain torch: from contributions ``[M, n]`` (float64, of the ranks that take
            part, not multiplied by their shares) and shares ``[M]`` to ``[n]``.
        symmetric: Whether the order of ranks does not matter.
        keeps_equal: Whether equal contributions return themselves, whatever the shares.
        sizes: Numbers of ranks to try `combine` with.
        seed: Seed of the random contributions.

    Raises:
        AssertionError: with a sentence that says what is broken, and for which shares.
    """
    check_dataclass(aggregator)
    for size in sizes:
        for shares in shares_to_try(size):
            ranks = Ranks(aggregator, shares, seed)
            for check in aggregator_contract.EVERY:
                check(ranks)
            if reference is not None:
                aggregator_contract.check_reference(ranks, reference)
            if symmetric:
                aggregator_contract.check_order(ranks)
            if keeps_equal:
                aggregator_contract.check_equal(ranks)
    for size in (2, 3, 4):
        aggregator_contract.check_exchange(aggregator, size, seed)
        aggregator_contract.check_bytes(aggregator, size, seed)
