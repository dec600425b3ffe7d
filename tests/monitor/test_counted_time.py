"""Where the time of reductions goes is measured where they run."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import make_wires
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import BlockInt8, ErrorFeedback
from lightning_sync.compressors.resolve import to_route
from lightning_sync.reducer import Reducer
from lightning_sync.state import ParamSpec, undelivered_norm
from tests.workers import run_ranks

SECONDS = ("encode_seconds", "wire_seconds", "decode_seconds")


def test_a_phase_adds_its_time_and_no_other() -> None:
    counters = Counters()
    for _ in range(2):
        with counters.phase("encode"):
            time.sleep(0.01)
    assert counters.encode_seconds is not None
    assert 0.02 <= counters.encode_seconds < 1
    assert counters.wire_seconds == counters.decode_seconds == 0


def test_a_phase_that_fails_is_counted_and_fails() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="broken"), counters.phase("wire"):
        raise ValueError("broken")
    assert counters.wire_seconds


def test_what_a_device_hides_is_not_made_up() -> None:
    counters = Counters()
    counters.leave_phases_out()
    with counters.phase("decode"):
        pass
    counters.load_state_dict(Counters(decode_seconds=3.0).state_dict())
    assert [getattr(counters, name) for name in SECONDS] == [None, None, None]


def reduce_beside_a_late_rank(rank: int, world_size: int) -> dict[str, Any]:
    counters = Counters()
    wires = make_wires(Topology(rank, (0,) * world_size), counters)
    spec = ParamSpec("w", (512, 512), torch.float32, torch.device("cpu"))
    reducer = Reducer([spec], to_route(BlockInt8()), wires)
    for step in range(3):
        reducer.step = step
        if rank == 1:
            time.sleep(0.2)
        reducer.reduce(["w"], [torch.randn(512, 512)])
    norm = undelivered_norm(reducer.states())
    kept = [t for kinds in reducer.state_dict().values() for t in kinds.values()]
    dist.barrier()
    assert norm is not None
    return {
        **{name: getattr(counters, name) for name in SECONDS},
        "norm": float(norm),
        "expected": float(torch.cat([t.double().view(-1) for t in kept]).norm()),
    }


def test_who_comes_last_waits_for_nobody() -> None:
    early, late = run_ranks(reduce_beside_a_late_rank, 2)
    assert early["wire_seconds"] > 0.5
    assert late["wire_seconds"] < 0.4
    for rank in (early, late):
        assert 0 < rank["encode_seconds"] < 0.5
        assert 0 < rank["decode_seconds"] < 0.5


def test_the_residual_norm_is_that_of_everything_kept() -> None:
    for rank in run_ranks(reduce_beside_a_late_rank, 2):
        assert rank["expected"] > 0
        assert abs(rank["norm"] - rank["expected"]) < 1e-5 * rank["expected"]


def test_without_memory_there_is_no_residual_norm() -> None:
    assert undelivered_norm([]) is None
    params = [ParamSpec("w", (4, 512), torch.float32, torch.device("cpu"))]
    assert undelivered_norm([BlockInt8().init(params)]) is None
    assert undelivered_norm([ErrorFeedback(BlockInt8()).init(params)]) is None  # nothing has been kept yet
