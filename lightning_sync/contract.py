"""The checks behind `lightning_sync.testing.check_compressor`, one promise each."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload
from lightning_sync.state import ParamSpec, State

LATE = 1_000_000  # a step after any warm-up
LAYOUTS = {
    1: ((0,),),
    2: ((0, 1), (0, 0)),
    3: ((0, 1, 2), (0, 0, 1)),
    4: ((0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)),
}


def make_specs(
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[ParamSpec, ...]:
    """Describe parameters by name and shape, in this order.

    Example:
        >>> [p.numel for p in make_specs({"weight": (3, 4), "bias": (3,)})]
        [12, 3]
    """
    return tuple(ParamSpec(name, tuple(shape), dtype, torch.device(device)) for name, shape in shapes.items())


def undelivered(states: Sequence[State], key: str) -> Tensor:
    """What all ranks together still keep of a parameter, in float64, flat, in units of the mean.

    Sums what every rank declares in `State.undelivered`. An arena ``"residual"`` that is not declared there counts as
    well: its first elements are the parameter's.
    """
    spec = states[0].spec(key)
    total = torch.zeros(spec.numel, dtype=torch.float64)
    for state in states:
        covers = state.covers()
        residual = state.arenas.get("residual")
        if residual is not None and key in residual and "residual" not in covers:
            total += residual[key][: spec.numel].double().cpu()
        for kind, of_kind in covers.items():
            if key in of_kind:
                places, real = of_kind[key].elements()
                values = state.arenas[kind][key].double().cpu()
                total.index_add_(0, places[real] - (spec.start or 0), values[real])
    return total


@dataclass(frozen=True)
class Bench:
    """One compressor, one number of ranks, one starting step."""

    compressor: Compressor
    shapes: Mapping[str, tuple[int, ...]]
    world_size: int
    step: int
    seed: int

    def specs(self, dtype: torch.dtype = torch.float32) -> tuple[ParamSpec, ...]:
        """The parameters, and slices of one of them where parameters may be cut."""
        whole = make_specs(self.shapes, dtype)
        cut = self.compressor.alignment
        if cut is None:
            return whole
        rows = -(-1024 // cut)
        sliced = ParamSpec("sliced", (1, rows * cut + 1), dtype, torch.device("cpu"))
        if not self.compressor.accepts(sliced):
            return whole
        middle = rows // 2 * cut
        pieces = [(0, middle), (middle, rows * cut), (rows * cut, sliced.numel)]
        return whole + tuple(sliced.slice(a, b) for a, b in pieces if b > a)

    def world(self, specs: Sequence[ParamSpec] | None = None, record: bool = False) -> SimulatedWorld:
        """Fresh ranks at this bench's first step."""
        world = SimulatedWorld(self.compressor, specs or self.specs(), self.world_size, self.seed, record)
        for state in world.states:
            state.step = self.step
        return world

    def gradients(self, specs: Sequence[ParamSpec], draw: int = 0) -> list[list[Tensor]]:
        """Random gradients of every rank, different in every draw."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + draw)
        return [
            [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in specs]
            for _ in range(self.world_size)
        ]

    def fail(self, ok: bool, text: str) -> None:
        """Raise AssertionError with `text` unless `ok`."""
        require(ok, f"{self.compressor!r}, {self.world_size} ranks, from step {self.step}: {text}")


def require(ok: bool, text: str) -> None:
    """Raise AssertionError with `text` unless `ok`."""
    if not ok:
        raise AssertionError(text)


def check_dataclass(compressor: object) -> None:
    """Hyper-parameters only, comparable and copyable."""
    kind = type(compressor)
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    require(
        frozen,
        f"{kind.__name__} must be a frozen dataclass: it holds constants only.",
    )
    require(copy.deepcopy(compressor) == compressor, f"a copy of {compressor!r} must be equal to it.")


def check_results(bench: Bench) -> None:
    """Shapes and dtypes are kept, and all ranks get the same bits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        specs = bench.specs(dtype)
        world = bench.world(specs)
        for draw in range(2):
            results = world.reduce(bench.gradients(specs, draw))
            for spec, *copies in zip(specs, *results, strict=True):
                first = copies[0]
                bench.fail(
                    first.shape == spec.shape and first.dtype == dtype,
                    f"{spec.key!r} went in as {spec.shape} {dtype} and came out as {tuple(first.shape)} {first.dtype}.",
                )
                bench.fail(
                    all(_same(first, other) for other in copies),
                    f"ranks got different bits for {spec.key!r} ({dtype}): decode what came back, not what was sent.",
                )


def check_units(compressor: Compressor, shapes: Mapping[str, tuple[int, ...]], step: int, seed: int) -> None:
    """The result is a mean, not a sum."""
    norms = {}
    for n in (1, 4):
        bench = Bench(compressor, shapes, n, step, seed)
        specs = bench.specs()
        gradient = bench.gradients(specs)[0]
        results = bench.world(specs).reduce([gradient] * n)[0]
        norms[n] = sum(float(t.double().square().sum()) for t in results) ** 0.5
    require(
        0.5 * norms[1] <= norms[4] <= 2 * norms[1],
        f"{compressor!r}: four ranks with the same gradient get a result of norm {norms[4]:.3g}, one rank gets "
        f"{norms[1]:.3g}. The result must be the mean: multiply the input by state.share, once.",
    )


def check_zeros(bench: Bench) -> None:
    """Zeros stay zeros and leave nothing behind."""
    specs = bench.specs()
    world = bench.world(specs)
    zeros = [[torch.zeros(p.shape) for p in specs] for _ in range(bench.world_size)]
    for _ in range(2):
        for spec, result in zip(specs, world.reduce(zeros)[0], strict=True):
            bench.fail(bool((result == 0).all()), f"zero gradients of {spec.key!r} came out as something else.")
    for draw in range(2):
        results = world.reduce(bench.gradients(specs, draw))[0]
    bench.fail(all(bool(t.isfinite().all()) for t in results), "after zero gradients, ordinary ones became non-finite.")
    bench.fail(any(bool((t != 0).any()) for t in results), "after zero gradients, ordinary ones came out as zeros.")


def check_non_finite(bench: Bench) -> None:
    """An overflow on one rank is seen by all, unless the element it is in is neither sent nor kept, whatever it is."""
    specs = bench.specs()
    target = next(i for i, p in enumerate(specs) if p.numel > 1)

    def outcome(value: float) -> tuple[Sequence[Sequence[Tensor]], list[Tensor]]:
        """Results of all ranks, and what they keep."""
        gradients = bench.gradients(specs)
        gradients[-1][target].view(-1)[1] = value
        world = bench.world(specs)
        results = world.reduce(gradients)
        return results, [t for s in world.states for kind in s.state_dict().values() for t in kind.values()]

    for value in (float("inf"), float("-inf"), float("nan")):
        try:
            results, kept = outcome(value)
        except OverflowError:
            continue
        waits = any(not bool(t.isfinite().all()) for t in kept)
        if waits or all(not bool(mine[target].isfinite().all()) for mine in results):
            continue
        (one, kept_one), (other, kept_other) = outcome(1.0), outcome(-3.0)
        bench.fail(
            _equal(one, other) and _equal([kept_one], [kept_other]),
            f"{value} in one rank's gradient of {specs[target].key!r} came out finite: an overflow must stay visible.",
        )


def check_strides(bench: Bench) -> None:
    """Transposed gradients give what contiguous ones give."""
    specs = bench.specs()
    plain, strided = bench.world(specs), bench.world(specs)
    for draw in range(2):
        gradients = bench.gradients(specs, draw)
        turned = [[_turn(t) for t in mine] for mine in gradients]
        bench.fail(
            _equal(plain.reduce(gradients), strided.reduce(turned)),
            "non-contiguous gradients gave another result than contiguous ones with the same values.",
        )


def check_payloads(bench: Bench) -> None:
    """Payloads are a function of inputs and state, and of one layout on all ranks."""
    specs = bench.specs()
    one, two = bench.world(specs, record=True), bench.world(specs, record=True)
    for draw in range(3):
        gradients = bench.gradients(specs, draw)
        one.reduce(gradients)
        torch.rand(1)  # the global generator must play no part
        two.reduce(gradients)
        for first, second in zip(one.sent, two.sent, strict=True):
            for a, b in zip(first, second, strict=True):
                bench.fail(
                    a.pattern == b.pattern and all(_same(x, y) for x, y in zip(a.tensors, b.tensors, strict=True)),
                    "the same inputs and state gave another payload: draw random numbers from seed, step and name.",
                )
        for sent in one.sent:
            layouts = {_layout(p) for p in sent}
            bench.fail(len(layouts) == 1, f"ranks sent payloads of different layouts in one round: {layouts}.")
            for rank, p in enumerate(sent):
                if p.pattern != "sum":
                    rows = p.splits[rank] if p.pattern == "gather" else sum(p.splits)
                    fits = len(p.splits) == bench.world_size and all(len(t) == rows for t in p.tensors)
                    bench.fail(fits, f"rank {rank} sent {[len(t) for t in p.tensors]} rows with splits {p.splits}.")


def check_bytes(bench: Bench) -> None:
    """Predicted bytes are the counted ones."""
    specs = bench.specs()
    world = bench.world(specs, record=True)
    world.reduce(bench.gradients(specs))
    for nodes in LAYOUTS[bench.world_size]:
        for rank in range(bench.world_size):
            topology = Topology(rank, nodes)
            counted = sum((payload_bytes(sent[rank], topology) for sent in world.sent), Bytes())
            predicted = bench.compressor.wire_bytes(specs, topology, bench.step)
            bench.fail(
                counted == predicted,
                f"wire_bytes predicts {predicted} for rank {rank} of nodes {nodes}, the wire counts {counted}.",
            )


def check_telescoping(bench: Bench) -> None:
    """Nothing is lost, only late."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        specs = bench.specs(dtype)
        world = bench.world(specs)
        meant = [torch.zeros(p.numel, dtype=torch.float64) for p in specs]
        delivered = [torch.zeros(p.numel, dtype=torch.float64) for p in specs]
        for draw in range(6):
            gradients = bench.gradients(specs, draw)
            for i, result in enumerate(world.reduce(gradients)[0]):
                delivered[i] += result.double().view(-1)
                for mine in gradients:
                    meant[i] += mine[i].double().view(-1) / bench.world_size
        if not ("residual" in world.states[0].arenas or world.states[0].covers()):
            return
        for spec, total, sent in zip(specs, meant, delivered, strict=True):
            error = _distance(sent + undelivered(world.states, spec.key), total)
            bench.fail(
                error <= tolerance,
                f"delivered plus residuals of {spec.key!r} ({dtype}) miss the true sum by {error:.2g} of its maximum.",
            )


def check_resume(bench: Bench) -> None:
    """A saved and loaded state goes on with the same bits."""
    specs = bench.specs()
    world = bench.world(specs)
    for draw in range(3):
        world.reduce(bench.gradients(specs, draw))
    saved = io.BytesIO()
    torch.save([s.state_dict() for s in world.states], saved)
    saved.seek(0)
    resumed = bench.world(specs)
    for state, tensors in zip(resumed.states, torch.load(saved, weights_only=True), strict=True):
        state.load_state_dict(tensors)
        state.step = world.states[0].step
    for draw in range(3, 6):
        gradients = bench.gradients(specs, draw)
        bench.fail(
            _equal(world.reduce(gradients), resumed.reduce(gradients)),
            "a run resumed from state_dict gave other bits than one that was not interrupted.",
        )


def check_buckets(bench: Bench, bitwise: bool) -> None:
    """How parameters are put into buckets changes nothing, even if it changes on the way."""
    specs = bench.specs()
    keys = [p.key for p in specs]
    together, apart = bench.world(specs), bench.world(specs)
    half = len(keys) // 2
    layouts = ([keys[::-1]], [[k] for k in keys], [keys[half:], keys[:half]], [keys])
    for draw, layout in enumerate(layouts):
        gradients = bench.gradients(specs, draw)
        expected = dict(zip(keys, together.reduce(gradients)[0], strict=True))
        step = apart.states[0].step
        for bucket in filter(None, layout):
            for state in apart.states:
                state.step = step
            mine = [[g[keys.index(k)] for k in bucket] for g in gradients]
            for key, result in zip(bucket, apart.reduce(mine, bucket)[0], strict=True):
                same = _same(result, expected[key]) if bitwise else _distance(result, expected[key]) <= 1e-4
                bench.fail(same, f"{key!r} came out differently in buckets {layout}: state belongs to parameters.")


def check_held(bench: Bench) -> None:
    """What happens inside `State.held` leaves no trace."""
    specs = bench.specs()
    for warm in (0, 2):
        world = bench.world(specs)
        for draw in range(warm):
            world.reduce(bench.gradients(specs, draw))
        before = [s.state_dict() for s in world.states]
        held = [p.key for p in specs][::2]
        with ExitStack() as stack:
            for state in world.states:
                stack.enter_context(state.held(held))
            world.reduce(bench.gradients(specs, 7))
        for state, old in zip(world.states, before, strict=True):
            new = state.state_dict()
            for key in held:
                kept = {kind: t[key] for kind, t in old.items() if key in t}
                left = {kind: t[key] for kind, t in new.items() if key in t}
                bench.fail(
                    kept.keys() == left.keys() and all(_same(kept[kind], left[kind]) for kind in kept),
                    f"State.held did not bring back the state of {key!r}: keep tensors in arenas, by parameter.",
                )


EVERY: tuple[Callable[[Bench], None], ...] = (
    check_results,
    check_zeros,
    check_non_finite,
    check_payloads,
    check_strides,
    check_bytes,
    check_resume,
    check_held,
)
"""The checks that need no options."""


def _layout(payload: Payload) -> tuple[object, ...]:
    """What has to be the same on all ranks (a gather's rows differ, as its splits say)."""
    skip = 0 if payload.pattern == "sum" else 1
    return payload.pattern, payload.splits, tuple((t.dtype, tuple(t.shape[skip:])) for t in payload.tensors)


def payload_bytes(payload: Payload, topology: Topology) -> Bytes:
    """What the wire counts for one payload."""
    if payload.pattern == "sum":
        return sum((topology.all_reduce(t.nbytes) for t in payload.tensors), Bytes())
    row = sum(t[0].nbytes if len(t) else 0 for t in payload.tensors)
    total = sum(payload.splits)
    per_rank = [n * row for n in payload.splits]
    if payload.pattern == "exchange":
        return topology.all_to_all(per_rank) if total else Bytes()
    return topology.all_gather(per_rank[topology.rank])


def _turn(tensor: Tensor) -> Tensor:
    """The same values with the strides of a transposed tensor."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else torch.stack([tensor, tensor], -1).unbind(-1)[0]


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, up to NaN's."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _equal(a: Sequence[Sequence[Tensor]], b: Sequence[Sequence[Tensor]]) -> bool:
    return all(_same(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def _distance(value: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest element of the reference."""
    if not value.numel():
        return 0.0
    return float((value.double() - reference.double()).abs().max() / reference.double().abs().max().clamp(min=1e-30))
