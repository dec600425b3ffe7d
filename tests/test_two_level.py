"""Two levels: every element belongs to exactly one local rank, and the detour over it changes nothing."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.comm.simulated import combine
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors import BF16, BlockInt8, Compressor, Exact, PowerSGD
from lightning_sync.state import ParamSpec
from lightning_sync.testing import make_specs
from lightning_sync.two_level import Shares, TwoLevelPlan

shapes = st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)
compressors: st.SearchStrategy[Compressor] = st.sampled_from([Exact(), BF16(), BlockInt8(8), PowerSGD(rank=1)])


def plan(compressor: Compressor, specs: tuple[ParamSpec, ...], place: int, size: int) -> Shares:
    return Shares.plan([(compressor, specs)], Topology(place, (0,) * size))


@settings(max_examples=80, deadline=None)
@given(compressors, shapes, st.integers(1, 4))
def test_every_element_belongs_to_exactly_one_local_rank(compressor: Compressor, sizes: list[Any], size: int) -> None:
    specs = make_specs({f"p{i}": s for i, s in enumerate(sizes)})
    everyone = [plan(compressor, specs, place, size) for place in range(size)]
    for spec in specs:
        owned = torch.zeros(spec.numel)
        for shares in everyone:
            assert shares.cuts == everyone[0].cuts, "all local ranks agree"
            for piece in shares.pieces([spec]):
                start = piece.start or 0
                owned[start : start + piece.numel] += 1
                if compressor.alignment is None:
                    assert piece is spec, "a matrix that is factored stays whole"
                else:
                    assert start % compressor.alignment == 0, "blocks are not cut"
        assert bool((owned == 1).all())


@settings(max_examples=60, deadline=None)
@given(compressors, shapes, st.integers(1, 4), st.randoms(use_true_random=False))
def test_scatter_and_gather_give_the_sum_to_everybody(
    compressor: Compressor, sizes: list[Any], size: int, random: Any
) -> None:
    specs = make_specs({f"p{i}": s for i, s in enumerate(sizes)}, torch.float64)
    bucket = list(specs)
    random.shuffle(bucket)
    plans = [TwoLevelPlan.make([p.name for p in bucket], plan(compressor, specs, place, size)) for place in range(size)]
    mine = [[torch.rand(p.shape, dtype=torch.float64) for p in bucket] for _ in range(size)]
    expected = [sum(g[i] for g in mine) * 0.5 for i in range(len(bucket))]
    scatters = [p.scatter(g, 0.5) for p, g in zip(plans, mine, strict=True)]
    owned = finish(scatters, combine([next(s) for s in scatters]))
    assert sum(t.numel() for part in owned for t in part) == sum(p.numel for p in specs)
    turned = [[t.mT.contiguous().mT if t.dim() > 1 else t for t in g] for g in mine]  # also into strided gradients
    gathers = [p.gather(part, g) for p, part, g in zip(plans, owned, turned, strict=True)]
    for result in finish(gathers, combine([next(g) for g in gathers])):
        for ours, reference in zip(result, expected, strict=True):
            assert torch.allclose(ours, reference)


def finish(runs: list[Any], answers: list[Any]) -> list[Any]:
    results = []
    for run, answer in zip(runs, answers, strict=True):
        with pytest.raises(StopIteration) as stop:
            run.send(answer)
        results.append(stop.value.value)
    return results


def test_work_is_dealt_out_evenly() -> None:
    specs = make_specs({f"layer{i}": (64, 64) for i in range(8)} | {"head": (256, 64)})
    fair = sum(p.numel for p in specs) / 4
    for compressor, limit in ((BlockInt8(), fair * 1.05), (PowerSGD(), 256 * 64)):  # no rank has more than the largest
        loads = [sum(p.numel for p in plan(compressor, specs, place, 4).pieces(specs)) for place in range(4)]
        assert max(loads) <= limit, (compressor, loads)


def test_one_block_parameters_do_not_all_go_to_the_first_rank() -> None:
    specs = make_specs({f"p{i}": (16, 16) for i in range(4)})
    assert [len(plan(BlockInt8(), specs, place, 4).pieces(specs)) for place in range(4)] == [1, 1, 1, 1]


@settings(max_examples=40, deadline=None)
@given(compressors, shapes, st.integers(1, 4))
def test_bytes_inside_the_node_are_one_reduce_scatter_and_one_all_gather(
    compressor: Compressor, sizes: list[Any], size: int
) -> None:
    specs = make_specs({f"p{i}": s for i, s in enumerate(sizes)})
    total = Bytes()
    for place in range(size):
        view = Topology(place, (0,) * size)
        total += plan(compressor, specs, place, size).intra_bytes(view)
    assert total == Bytes(2 * (size - 1) * sum(4 * p.numel for p in specs), 0)
