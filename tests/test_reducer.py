"""The reducer: buckets in, means out, and nothing lost on the way."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sync.aggregators import Adasum, Median
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import Wires, make_group_wire, make_wires
from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors import (
    BF16,
    FP16,
    AcpSGD,
    BlockInt8,
    ChunkTopK,
    ErrorFeedback,
    MomentumCorrection,
    Payload,
    PlainBlocks,
    PowerSGD,
    RandomBlock,
    Reduction,
    Route,
    as_route,
)
from lightning_sync.reducer import Reducer
from lightning_sync.rounds import drive, drive_each
from lightning_sync.state import ParamSpec
from lightning_sync.testing import make_specs
from tests.workers import run_ranks

SHAPES = {"a": (40, 30), "a.bias": (40,), "sometimes": (36, 33), "b": (30, 40)}


def alone() -> Wires:
    """A world of one rank, which needs no process group."""
    return Wires(GroupWire(None, Topology(0, (0,)), Counters()))  # type: ignore[arg-type]


# ---- a parameter that is used every second step

FEEDBACK = {
    "int8": as_route(ErrorFeedback(BlockInt8())),
    "powersgd": as_route(PowerSGD(rank=2, warmup_steps=1)),
    "powersgd, aggregate": as_route(PowerSGD(rank=2, warmup_steps=0, residual="aggregate")),
    "mixed": Route([("a", PowerSGD(rank=1, warmup_steps=0)), ("*", ErrorFeedback(BlockInt8(64)))]),
    "acp": as_route(AcpSGD(rank=2, warmup_steps=1)),
    "topk": as_route(ErrorFeedback(ChunkTopK(0.1, 64))),
    "random blocks, int8": as_route(ErrorFeedback(RandomBlock(0.3, 64, BlockInt8(32)))),
}


def gradients(specs: list[ParamSpec] | tuple[ParamSpec, ...], rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in specs]


def is_used(name: str, step: int) -> bool:
    return name != "sometimes" or step % 2 == 0


def residuals(reducer: Reducer) -> dict[str, Tensor]:
    """What this rank keeps, placed in the whole parameters, in float64."""
    kept = {name: torch.zeros(torch.Size(shape).numel(), dtype=torch.float64) for name, shape in SHAPES.items()}
    for served in reducer._served:
        state = served.state
        for key, tensor in state.state_dict().get("residual", {}).items():
            spec = state.spec(key)
            start = spec.start or 0
            kept[spec.name][start : start + spec.numel] += tensor[: spec.numel]
        for key, tensor in state.state_dict().get("owner_residual", {}).items():
            spec, block = state.spec(key), int(state.cache["block"])  # type: ignore[call-overload]
            first = state.cache["first_block"][key]  # type: ignore[index]
            mine = [i for i in range(-(-spec.numel // block)) if (first + i) % state.world_size == state.rank]
            for i, row in zip(mine, tensor.view(-1, block), strict=True):
                start = i * block
                stop = min(start + block, spec.numel)
                kept[spec.name][(spec.start or 0) + start : (spec.start or 0) + stop] += row[: stop - start]
    return kept


def wires_of(case: str, rank: int) -> Wires | None:
    """All ranks make the groups of all cases; those outside of a case's group sit it out."""
    if case == "2x2":
        return make_wires(Topology(rank, (0, 0, 1, 1)), Counters())
    inside = list(range(int(case)))
    wire = make_group_wire(
        [inside, *[[r] for r in range(4) if r not in inside]], Topology(rank, (0, 1, 2, 3)), Counters()
    )
    return Wires(wire) if rank in inside else None


def alternate(rank: int, world_size: int) -> dict[Any, Any]:
    """Per case: what was delivered, what this rank keeps, and the names of its state."""
    specs = make_specs(SHAPES, torch.float64)
    names = [p.name for p in specs]
    found = {}
    for case in ("2", "3", "2x2"):
        for method, route in FEEDBACK.items():
            wires = wires_of(case, rank)
            if wires is None:
                continue
            reducer = Reducer(specs, route, wires)
            delivered = {name: torch.zeros(torch.Size(s).numel(), dtype=torch.float64) for name, s in SHAPES.items()}
            for step in range(9):
                reducer.step = step
                mine = dict(zip(names, gradients(specs, rank, step), strict=True))
                unused = [n for n in names if not is_used(n, step)]
                for name in unused:  # DDP hands over zeros, and throws away what comes back
                    mine[name].zero_()
                buckets = ([names], [names[2:], names[:2]], [[n] for n in reversed(names)])[step % 3]
                for bucket in buckets:
                    reducer.reduce(bucket, [mine[n] for n in bucket], unused)
                for name in names:
                    if name not in unused:
                        delivered[name] += mine[name].view(-1)
            keys = sorted({key for tensors in reducer.state_dict().values() for key in tensors})
            found[case, method] = (delivered, residuals(reducer), keys)
    return found


@pytest.fixture(scope="module")
def alternating() -> list[dict[Any, Any]]:
    return run_ranks(alternate, 4, deadline=100)


def true_sum(world_size: int) -> dict[str, Tensor]:
    specs = make_specs(SHAPES, torch.float64)
    total = {p.name: torch.zeros(p.numel, dtype=torch.float64) for p in specs}
    for step in range(9):
        for rank in range(world_size):
            for p, g in zip(specs, gradients(specs, rank, step), strict=True):
                if is_used(p.name, step):
                    total[p.name] += g.view(-1) / world_size
    return total


@pytest.mark.dist
@pytest.mark.parametrize("method", FEEDBACK)
@pytest.mark.parametrize("case", ["2", "3", "2x2"])
def test_delivered_plus_residuals_is_the_true_sum(alternating: list[dict[Any, Any]], case: str, method: str) -> None:
    ranks = alternating[: 4 if case == "2x2" else int(case)]
    delivered = ranks[0][case, method][0]
    for other in ranks[1:]:
        assert all(torch.equal(delivered[n], other[case, method][0][n]) for n in SHAPES), "the same bits on all ranks"
    for name, meant in true_sum(len(ranks)).items():
        kept = sum(r[case, method][1][name] for r in ranks)
        assert torch.allclose(delivered[name] + kept, meant, atol=1e-9), name
        if name == "sometimes":
            assert float(kept.abs().max()) > 1e-3, "the test would pass without a residual"


@pytest.mark.dist
def test_on_two_levels_blocks_belong_to_slices_and_matrices_to_one_local_rank(
    alternating: list[dict[Any, Any]],
) -> None:
    int8 = [r["2x2", "int8"][2] for r in alternating]
    assert int8[0] == int8[2]
    assert int8[1] == int8[3]
    assert "sometimes[0:512]" in int8[0] + int8[1]
    assert not set(int8[0]) & set(int8[1])
    powersgd = [set(r["2x2", "powersgd"][2]) for r in alternating]
    assert powersgd[0] | powersgd[1] == {"a", "b", "sometimes"}
    assert not powersgd[0] & powersgd[1]


# ---- the real wire and the simulated world


def real_and_simulated(rank: int, world_size: int) -> list[str]:
    """Names of the methods whose results differ from the simulated world's, by bits."""
    specs = make_specs({"a": (40, 30), "b": (30, 40)})
    differs = []
    for name, compressor in {
        "int8": ErrorFeedback(BlockInt8()),
        "bf16": BF16(),
        "powersgd": PowerSGD(warmup_steps=1),
        "acp": AcpSGD(rank=2, warmup_steps=1),
        "topk": ErrorFeedback(ChunkTopK(0.1, 64)),
        "topk, gathered": ErrorFeedback(ChunkTopK(0.1, 256, "2bit", "gather")),
        "random blocks": ErrorFeedback(RandomBlock(0.3, 64)),
        "random blocks, int8": ErrorFeedback(RandomBlock(0.3, 64, BlockInt8(32))),
        "dgc": MomentumCorrection(ChunkTopK(0.1, 64)),
    }.items():
        reducer = Reducer(specs, as_route(compressor), make_wires(Topology(rank, (0, 1)), Counters()))
        world = SimulatedWorld(compressor, specs, world_size)
        for step in range(4):
            everyone = [[t.float() for t in gradients(specs, r, step)] for r in range(world_size)]
            expected = world.reduce(everyone)[rank]
            mine = [t.clone() for t in everyone[rank]]
            reducer.step = step
            reducer.reduce(["a", "b"], mine)
            if not all(torch.equal(x, y) for x, y in zip(expected, mine, strict=True)):
                differs.append(name)
    return differs


@pytest.mark.dist
def test_two_real_ranks_get_the_bits_of_the_simulated_world() -> None:
    assert run_ranks(real_and_simulated, 2) == [[], []]


# ---- parts


class CountingWire(GroupWire):
    """A wire of one rank that remembers how many payloads took part in each round."""

    def __init__(self) -> None:
        super().__init__(None, Topology(0, (0,)), Counters())  # type: ignore[arg-type]
        self.rounds: list[int] = []

        self.log: list[str] = []

    def start(self, payloads: Any) -> Any:
        self.rounds.append(len(payloads))
        number = len(self.rounds)
        self.log.append(f"start {number}")
        finish = super().start(payloads)

        def logged() -> list[Payload]:
            self.log.append(f"finish {number}")
            return finish()

        return logged


def rounds(number: int) -> Reduction:
    for _ in range(number):
        yield Payload("sum", (torch.ones(1),))
    return [torch.tensor(number)]


def test_reductions_of_different_length_run_in_lock_step() -> None:
    wire = CountingWire()
    results = drive([rounds(2), rounds(0), rounds(3)], wire)
    assert [int(r[0]) for r in results] == [2, 0, 3]
    assert wire.rounds == [2, 2, 1], "round k of all of them is one round on the wire"
    assert drive([], wire) == []


def test_some_buckets_are_encoded_while_others_travel_in_an_order_that_timing_cannot_change() -> None:
    wire = CountingWire()
    runs = drive_each(([rounds(n)] for n in (2, 1, 0, 2)), wire, depth=2)
    assert [(place, int(result[0][0])) for place, result in runs] == [(1, 1), (2, 0), (0, 2), (3, 2)]
    assert wire.log == [
        *("start 1", "start 2", "finish 1", "start 3"),  # two under way: the first goes on to its second round
        *("finish 2", "start 4", "finish 3", "finish 4", "start 5", "finish 5"),
    ]


def test_several_compressors_of_one_bucket_share_their_rounds() -> None:
    wire = CountingWire()
    Reducer(make_specs(SHAPES), FEEDBACK["mixed"], Wires(wire)).reduce(
        list(SHAPES), [torch.randn(s) for s in SHAPES.values()]
    )
    assert wire.rounds == [3, 2], "int8, PowerSGD and the exact bias; then the second rounds of the first two"


def saved_and_resumed(route: Route) -> tuple[Reducer, Reducer]:
    specs = make_specs(SHAPES)
    first, second = (Reducer(specs, route, alone()) for _ in range(2))
    for step in range(3):
        first.step = step
        first.reduce(list(SHAPES), [g.float() for g in gradients(specs, 0, step)])
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("method", FEEDBACK)
def test_a_resumed_reducer_goes_on_with_the_same_bits(method: str) -> None:
    pair = saved_and_resumed(FEEDBACK[method])
    assert any(pair[0].state_dict().values())
    results = []
    for reducer in pair:
        reducer.step = 3
        results.append([g.float() for g in gradients(make_specs(SHAPES), 0, 3)])
        reducer.reduce(list(SHAPES), results[-1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_of_another_model_is_refused() -> None:
    reducer = Reducer(make_specs(SHAPES), FEEDBACK["int8"], alone())
    with pytest.raises(ValueError, match=r"State holds 'elsewhere', which this run does not reduce"):
        reducer.load_state_dict({"residual": {"elsewhere": torch.zeros(3)}})
    with pytest.raises(ValueError, match="elements, but this model expects"):
        reducer.load_state_dict({"residual": {"a": torch.zeros(3)}})


def test_an_aggregator_that_needs_every_contribution_refuses_sums() -> None:
    with pytest.raises(ValueError, match=r"Median\(\) needs every rank's contribution, which PowerSGD.* does not hand"):
        Reducer(make_specs(SHAPES), as_route(PowerSGD()), alone(), Median())
    with pytest.raises(ValueError, match=r"Median\(\) needs every rank's contribution, which FP16\(\) does not hand"):
        Reducer(make_specs(SHAPES), as_route(FP16()), alone(), Median())
    reducer = Reducer(make_specs(SHAPES), as_route(BlockInt8()), alone(), Median())
    assert reducer.compressor_of("a") == BlockInt8()
    assert reducer.compressor_of("a.bias") == PlainBlocks(), "what is too small to compress is exchanged as it is"


def test_an_aggregator_of_whole_parameters_refuses_compressors_that_do_not_tell_them_apart() -> None:
    class Deaf(BlockInt8):
        by_parameter = False

    with pytest.raises(ValueError, match=r"needs every rank's contribution to whole parameters, which .*Deaf\("):
        Reducer(make_specs(SHAPES), as_route(Deaf()), alone(), Adasum())
    Reducer(make_specs(SHAPES), as_route(Deaf()), alone(), Median())


def test_dense_bytes_are_what_a_ring_would_have_sent() -> None:
    counters = Counters()
    counters.count_dense(Topology(0, (0, 1)).all_reduce(1000))
    counters.count(250, Topology(0, (0, 1)).all_reduce(250), messages=2)
    assert (counters.dense_bytes, counters.wire_bytes, counters.network_bytes) == (1000, 250, 250)
    assert (counters.compression_ratio, counters.messages) == (4.0, 2)
    assert Counters().compression_ratio is None
