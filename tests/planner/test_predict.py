"""Predictions are what the formulas say: limits by hand, queues by hand, and never better than compute alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import PowerSGD, registry
from lightning_sync.compressors.resolve import to_route, with_feedback
from lightning_sync.planner.advise import Candidate, predict_all, recommend
from lightning_sync.planner.measure import CodecRun, measure_codec
from lightning_sync.planner.predict import (
    Compute,
    Link,
    Traffic,
    achieved_period,
    bucket_shares,
    delayed,
    periodic,
    strict,
)
from lightning_sync.state import ParamSpec

COMPUTE = Compute(forward=1.0, backward=2.0, optimizer=0.5)
LINK = Link(bytes_per_second=100.0, round_seconds=0.0)
times = st.floats(0.001, 100)


def test_a_single_bucket_waits_for_the_whole_backward_pass() -> None:
    traffic = Traffic(interface_bytes=300, local_bytes=0, rounds=1, codec_seconds=0.25)
    assert strict(COMPUTE, [1.0], traffic, LINK, None) == pytest.approx(1 + 2 + 3 + 0.25 + 0.5)


def test_buckets_travel_during_the_backward_pass_one_after_the_other() -> None:
    # ready at 2 and 3; the first travels from 2 to 3.5, the second from 3.5 to 5
    traffic = Traffic(interface_bytes=300, local_bytes=0, rounds=1, codec_seconds=0.0)
    assert strict(COMPUTE, [0.5, 0.5], traffic, LINK, None) == pytest.approx(5 + 0.5)


def test_every_round_of_every_bucket_costs_its_latency() -> None:
    link = Link(100.0, 0.1)
    traffic = Traffic(0, 0, rounds=3, codec_seconds=0.0)
    assert strict(COMPUTE, [1.0], traffic, link, None) == pytest.approx(3 + 0.3 + 0.5)


def test_inside_a_node_bytes_have_their_own_rate() -> None:
    traffic = Traffic(interface_bytes=100, local_bytes=50, rounds=1, codec_seconds=0.0)
    assert traffic.seconds(LINK, Link(10.0, 0.0)) == pytest.approx(1 + 5)


def test_delayed_hides_what_is_shorter_than_a_step() -> None:
    assert delayed(COMPUTE, Traffic(340, 0, 1, 0.0), LINK, None) == COMPUTE.seconds
    assert delayed(COMPUTE, Traffic(700, 0, 1, 0.0), LINK, None) == pytest.approx(7)


def test_a_period_divides_what_overlap_does_not_hide() -> None:
    traffic = Traffic(1000, 0, 1, 0.0)  # 10 s of wire
    assert periodic(COMPUTE, traffic, LINK, None, sync_every=10) == pytest.approx(3.5 + 1)
    assert periodic(COMPUTE, traffic, LINK, None, sync_every=10, overlap_steps=2) == pytest.approx(3.5 + 0.3)
    assert periodic(COMPUTE, traffic, LINK, None, sync_every=10, overlap_steps=3) == pytest.approx(3.5)


def test_asynchronous_exchanges_are_as_rare_as_the_wire_makes_them() -> None:
    assert achieved_period(COMPUTE, Traffic(350, 0, 1, 0.0), LINK, None, sync_every=8) == 8
    assert achieved_period(COMPUTE, Traffic(3500, 0, 1, 0.0), LINK, None, sync_every=8) == pytest.approx(10)


@given(times, times, times, st.floats(0, 1e4), st.floats(0, 10), st.integers(1, 64), st.integers(1, 8))
def test_nothing_is_faster_than_compute_nor_slower_than_no_overlap(
    forward: float, backward: float, optimizer: float, nbytes: float, codec: float, period: int, parts: int
) -> None:
    compute, traffic = Compute(forward, backward, optimizer), Traffic(nbytes, 0, 2, codec)
    whole = traffic.seconds(LINK, None)
    shares = [1 / parts] * parts
    for seconds in (
        strict(compute, shares, traffic, LINK, None),
        delayed(compute, traffic, LINK, None),
        periodic(compute, traffic, LINK, None, sync_every=period, fragments=parts),
    ):
        assert compute.seconds * (1 - 1e-9) <= seconds <= (compute.seconds + whole) * (1 + 1e-9)


@pytest.mark.parametrize("total", [1000, 2**20, 26 * 10**6, 80 * 2**20])
def test_buckets_hold_everything(total: int) -> None:
    shares = bucket_shares(total, 25 * 2**20)
    assert sum(shares) == pytest.approx(1)
    assert shares[0] * total <= 2**20
    assert max(shares) * total <= 25 * 2**20 + 1


CANDIDATES = (
    Candidate("strict", "strict", price="none"),
    Candidate("half", "strict", "bf16", price="little"),
    Candidate("rare", "periodic", "none", 100, price="much"),
)


def advice(dense_bytes: float) -> tuple[str, str]:
    def traffic(candidate: Candidate) -> Traffic:
        return Traffic(dense_bytes / 2 if candidate.compressor == "bf16" else dense_bytes, 0, 1, 0.0)

    chosen, why = recommend(predict_all(CANDIDATES, traffic, COMPUTE, LINK, None, 10**6))
    return chosen.candidate.name, why


def test_the_first_mode_that_is_fast_enough_is_recommended() -> None:
    name, why = advice(10)
    assert (name, why[:8]) == ("strict", "Keep DDP")
    assert advice(60)[0] == "half"
    name, why = advice(10_000)
    assert name == "rare"
    assert "much" in why


@pytest.mark.parametrize("name", [*registry, "powersgd at once"])
def test_a_codec_is_timed_on_what_it_really_sends(name: str) -> None:
    """The answers are made up, but rounds and payloads are those of a world of ranks."""
    built = PowerSGD(warmup_steps=0) if name == "powersgd at once" else registry.build(name)
    for _, compressor in to_route(built).rules:
        shapes = [
            s for s in ((64, 48), (300,)) if compressor.accepts(ParamSpec("x", s, torch.float32, torch.device("cpu")))
        ]
        tensors = [torch.randn(s) for s in shapes]
        run = CodecRun(with_feedback(compressor), tensors, ranks=3)
        params = [ParamSpec(f"p{i}", s, torch.float32, torch.device("cpu")) for i, s in enumerate(shapes)]
        world = SimulatedWorld(with_feedback(compressor), params, 3)
        world.reduce([tensors] * 3)
        took = run.step()
        assert took.rounds >= 1
        first = next(iter(world.payload_bytes.values()))
        assert took.payload_bytes >= first


def test_codecs_of_a_route_add_up() -> None:
    params = [
        ParamSpec("a", (64, 64), torch.float32, torch.device("cpu")),
        ParamSpec("b", (64,), torch.float32, torch.device("cpu")),
    ]
    seconds, rounds = measure_codec(to_route(registry.build("int8")), params, ranks=4)
    assert 0 < seconds < 1
    assert rounds == 2
