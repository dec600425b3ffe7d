"""The real wire gives what the simulated collectives give, sends narrow tensors, and counts every byte."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import make_wires
from lightning_sync.comm.simulated import combine
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors import AcpSGD, Compressor, Payload, PowerSGD, registry
from lightning_sync.compressors.resolve import to_route
from lightning_sync.reducer import Reducer
from lightning_sync.testing import make_specs
from tests.comm.census import Call, census
from tests.workers import run_ranks

# ---- combining


def rounds(world_size: int) -> list[list[list[Payload]]]:
    """Rounds of payloads, ``[round][payload][rank]``, from a seed that all ranks share."""
    generator = torch.Generator().manual_seed(5)

    def draw(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Whole numbers, so that sums do not depend on their order.
        return torch.randint(-50, 50, tuple(shape), generator=generator).to(dtype)

    uneven = tuple(range(1, world_size + 1))
    sparse = (0,) * (world_size - 1) + (3,)

    def sums(*dtypes: torch.dtype, shape: Sequence[int] = (3, 2)) -> list[Payload]:
        return [Payload("sum", tuple(draw(shape, d) for d in dtypes)) for _ in range(world_size)]

    def exchange(splits: tuple[int, ...], *columns: tuple[Sequence[int], torch.dtype]) -> list[Payload]:
        rows = sum(splits)
        return [Payload("exchange", tuple(draw((rows, *s), d) for s, d in columns), splits) for _ in range(world_size)]

    def gather(splits: tuple[int, ...], *columns: tuple[Sequence[int], torch.dtype]) -> list[Payload]:
        return [Payload("gather", tuple(draw((n, *s), d) for s, d in columns), splits) for n in splits]

    int8 = (((5,), torch.int8), ((1,), torch.float32))
    odd = (((3,), torch.uint8),)
    return [
        [sums(torch.float32)],
        [
            sums(torch.bfloat16),
            sums(torch.float16),
            sums(torch.float64, torch.float32),
            sums(torch.float32, shape=(0,)),
        ],
        [exchange(uneven, *int8)],
        [gather(uneven, *int8)],
        [exchange(sparse, *odd, *int8)],
        [gather(sparse, *int8)],
        [exchange(uneven, *odd), exchange(sparse, ((), torch.float64)), exchange((0,) * world_size, *int8)],
        [gather(sparse, *odd), sums(torch.float32), exchange(uneven, *int8), gather(uneven, ((2, 2), torch.bfloat16))],
    ]


def clone(payload: Payload) -> Payload:
    return Payload(payload.pattern, tuple(t.clone() for t in payload.tensors), payload.splits)


def against_simulation(rank: int, world_size: int) -> list[tuple[int, int]]:
    wire = GroupWire(dist.new_group(), Topology(rank, tuple(range(world_size))), Counters())  # type: ignore[arg-type]
    wrong = []
    for number, payloads in enumerate(rounds(world_size)):
        expected = [combine([clone(p) for p in everyone])[rank] for everyone in payloads]
        received = wire.round([clone(everyone[rank]) for everyone in payloads])
        for place, (ours, reference) in enumerate(zip(received, expected, strict=True)):
            same = ours.pattern == reference.pattern and all(
                a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
                for a, b in zip(ours.tensors, reference.tensors, strict=True)
            )
            if not same:
                wrong.append((number, place))
    flags = torch.tensor([rank == 0, rank == world_size - 1, False], dtype=torch.uint8)
    assert wire.any(flags).tolist() == [1, 1, 0]
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_pattern_combines_as_the_simulated_world_does(world_size: int) -> None:
    assert run_ranks(against_simulation, world_size) == [[]] * world_size


def test_a_group_of_one_sends_nothing_and_gets_its_own_back() -> None:
    counters = Counters()
    wire = GroupWire(None, Topology(0, (0,)), counters)  # type: ignore[arg-type]
    sent = [
        Payload("sum", (torch.ones(3),)),
        Payload("exchange", (torch.ones(2, 3),), (2,)),
        Payload("gather", (torch.ones(2),), (2,)),
    ]
    back = wire.round(sent)
    assert [tuple(p.tensors[0].shape) for p in back] == [(3,), (1, 2, 3), (2,)]
    assert (counters.collectives, counters.wire_bytes) == (0, 0)


# ---- bytes

SHAPES = {
    "a.weight": (60, 50),
    "a.bias": (60,),
    "b.weight": (33, 47),
    "b.bias": (33,),
    "conv": (16, 8, 3, 3),
    "tiny": (2, 2),
}
COMPRESSORS: dict[str, Compressor | Any] = {name: registry.build(name) for name in registry} | {
    "powersgd": PowerSGD(rank=2, warmup_steps=1),
    "acp": AcpSGD(rank=2, warmup_steps=1),
}
NODES = {2: [(0, 1), (0, 0)], 4: [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)]}


def count_all(rank: int, world_size: int) -> dict[Any, Any]:
    """Counted and predicted bytes, and the census, of two steps in two buckets, for every compressor and layout."""
    specs = make_specs(SHAPES)
    names = list(SHAPES)
    results = {}
    for nodes in NODES[world_size]:
        for name, compressor in COMPRESSORS.items():
            counters = Counters()
            reducer = Reducer(specs, to_route(compressor), make_wires(Topology(rank, nodes), counters))
            for step in (0, 1):
                reducer.step = step
                before = counters.sent
                tensors = [torch.randn(s) for s in SHAPES.values()]
                with census() as calls:
                    reducer.reduce(names[:3], tensors[:3])
                    reducer.reduce(names[3:], tensors[3:])
                counted = (counters.sent.sent - before.sent, counters.sent.network - before.network)
                predicted = reducer.predicted_bytes(step)
                results[nodes, name, step] = (counted, (predicted.sent, predicted.network), calls)
    return results


@pytest.fixture(scope="module")
def counted() -> dict[int, list[dict[Any, Any]]]:
    """Results by world size and rank."""
    return {n: run_ranks(count_all, n, deadline=150) for n in NODES}


Counted = dict[int, list[dict[Any, Any]]]


def cases(counted: Counted) -> Iterator[tuple[int, tuple[int, ...], str, int, Any, Any, list[Call]]]:
    """Rank, nodes, compressor, step, counted, predicted and census of every case."""
    for ranks in counted.values():
        for rank, results in enumerate(ranks):
            for (nodes, name, step), result in results.items():
                yield rank, nodes, name, step, *result


def is_two_level(nodes: tuple[int, ...]) -> bool:
    per_node = Topology(0, nodes).ranks_per_node
    return per_node is not None and 1 < per_node < len(nodes)


@pytest.mark.dist
def test_counted_bytes_are_the_predicted_ones_exactly(counted: Counted) -> None:
    for rank, nodes, name, step, seen, predicted, _ in cases(counted):
        assert seen == predicted, (rank, nodes, name, step)


@pytest.mark.dist
def test_counted_bytes_are_those_of_the_tensors_that_collectives_get(counted: Counted) -> None:
    for rank, nodes, name, step, seen, _, calls in cases(counted):
        if not is_two_level(nodes):  # with two groups, a ring's factor depends on which
            n = len(nodes)
            ring = Fraction(2 * (n - 1), n)
            total = sum((ring if c.name == "all_reduce" else 1) * c.sends * c.dtype.itemsize for c in calls if c.dtype)
            assert seen[0] == total, (rank, nodes, name, step)


EXACT = {("all_reduce", torch.float32)}
# Elements of a block, and its bytes: a float32 number with each, and a byte, half a byte or a bit per element.
CODECS = {
    "int8": (256, 260),
    "fp8": (256, 260),
    "int4": (256, 132),
    "sign": (256, 36),
    "sign_vote": (256, 36),
    "qsgd": (512, 260),
}
WIRE_DTYPES = {
    "none": EXACT,
    "bf16": {("all_reduce", torch.bfloat16)},
    "fp16": {("all_reduce", torch.float16)},
    **{name: {("all_to_all_single", torch.uint8), *EXACT} for name in CODECS},  # vectors travel exactly
    "powersgd": EXACT,
    "acp": EXACT,
    "topk": {("all_to_all_single", torch.uint8), *EXACT},
    "random_block": EXACT,
    "dgc": {("all_to_all_single", torch.uint8), *EXACT},
}
# Elements of a block, and its bytes: 1 % and 25 % of 4096 elements, with 2 + 4 bytes each.
CODES = {**CODECS, "topk": (4096, 41 * 6), "dgc": (4096, 1024 * 6)}


@pytest.mark.dist
def test_the_tensors_on_the_wire_are_narrow(counted: Counted) -> None:
    """No float32 tensors of rounded values: the collectives get uint8, bfloat16, float16, or thin factors."""
    elements = sum(p.numel for p in make_specs(SHAPES))
    for _, nodes, name, step, _, _, calls in cases(counted):
        if not is_two_level(nodes):  # there the inner level is exact, on purpose
            assert {(c.name, c.dtype) for c in calls} == WIRE_DTYPES[name], (nodes, name)
            assert narrow_enough(name, step, calls, elements, len(nodes)), (nodes, name, step)


def narrow_enough(name: str, step: int, calls: list[Call], elements: int, n: int) -> bool:
    handed = {dtype: sum(c.numel for c in calls if c.dtype == dtype) for dtype in {c.dtype for c in calls}}
    specs = {p.name: p for p in make_specs(SHAPES)}
    large = [p for p in specs.values() if len(p.shape) > 1 and p.numel >= 1024]
    vectors = elements - sum(p.numel for p in large)
    if name in CODES:
        block, row = CODES[name]
        codes = sum(-(-p.numel // block) * row for p in large)
        # The exchange holds all blocks once; the gather holds this rank's blocks once per rank.
        return handed[torch.float32] == vectors and codes <= handed[torch.uint8] <= codes * 2 + n * n * 2 * row
    if name == "random_block":
        return handed[torch.float32] == vectors + len(large) * 256
    if name == "acp" and step == 1:
        return handed[torch.float32] == vectors + sum(2 * p.shape[0] for p in large)
    if name == "powersgd" and step == 1:
        factors = sum(
            2 * (p.shape[0] + p.numel // p.shape[0]) for k, p in specs.items() if k in ("a.weight", "b.weight", "conv")
        )
        return handed[torch.float32] == factors + 60 + 33 + 4
    return sum(handed.values()) == elements


@pytest.mark.dist
def test_two_levels_send_less_between_nodes_than_a_flat_ring(counted: Counted) -> None:
    for name in COMPRESSORS:
        flat, levels = (sum(r[nodes, name, 1][0][1] for r in counted[4]) for nodes in ((0, 1, 2, 3), (0, 0, 1, 1)))
        assert 0 < levels < flat, name
