"""Asynchronous exchanges over real sockets: nothing is lost or counts twice, and bounds are kept."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sync.asynchronous.codec import codec_for
from lightning_sync.asynchronous.rules import DelayedNesterov, Elastic, Quorum
from lightning_sync.compressors import BF16, BlockInt4, BlockInt8, Sign
from lightning_sync.nonfinite import NonFiniteError
from tests.asynchronous.world import SHAPES, Rank, flat, run, whole, world


def train(rank: Rank, steps: int, seed: int, slow: float = 0.0, delay: float = 0.0) -> tuple[Tensor, Tensor]:
    """All this rank has subtracted, and what the owners hold at the end."""
    generator = torch.Generator().manual_seed(1000 * seed + rank.rank)
    dice = random.Random(seed * 10 + rank.rank)
    rank.engine.pause = lambda: dice.random() * delay
    total = torch.zeros(rank.flat.numel())
    for _ in range(steps):
        change = whole(generator)
        total += flat(change)
        rank.step(change)
        if slow:
            time.sleep(dice.random() * slow)
    rank.engine.meet()
    return total, rank.engine.replica.fetched.clone()


def test_four_ranks_of_different_length_end_with_the_sum_of_all_they_did() -> None:
    ranks = world(4)
    results = run(ranks, lambda r: train(r, 20 * (r.rank + 1), seed=1))
    expected = -sum(total for total, _ in results)
    for rank, (_, held) in zip(ranks, results, strict=True):
        assert torch.equal(held, expected), "every rank reads the sum of all deltas"
        assert torch.equal(rank.flat, expected), "and goes on from it"
        ledger = rank.engine.owner.shard.ledger
        assert ledger.repeated == 0
        assert ledger.taken == sum(r.engine.replica.sent for r in ranks)


@pytest.mark.parametrize("seed", range(25))
def test_with_random_delays_nothing_is_lost_or_applied_twice(seed: int) -> None:
    every = 1 + seed % 3
    bound = (None, 0, 2)[seed % 3]
    ranks = world(3, every=every, bound=bound, blocking=bool(seed % 2))
    results = run(ranks, lambda r: train(r, 12, seed, slow=0.002, delay=0.004))
    expected = -sum(total for total, _ in results)
    for _, held in results:
        assert torch.equal(held, expected)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("blocking", [True, False])
def test_whoever_is_at_clock_c_has_read_every_update_up_to_c_minus_s_minus_1(bound: int, blocking: bool) -> None:
    ranks = world(4, bound=bound, blocking=blocking)
    steps = 45

    def body(rank: Rank) -> list[tuple[int, int]]:
        seen = []
        generator = torch.Generator().manual_seed(rank.rank)
        dice = random.Random(rank.rank)
        for _ in range(steps):
            clock = rank.engine.replica.clock
            if clock:
                seen.append((clock, min(rank.engine.replica.contains.values())))
            rank.step(whole(generator))
            if dice.random() < 0.05:
                time.sleep(0.02)
        rank.engine.meet()
        return seen

    for seen in run(ranks, body):
        assert len(seen) >= steps - 2
        for clock, reached in seen:
            assert reached >= clock - bound, f"at clock {clock} it read updates below {reached} only"


def test_one_replica_is_the_one_worker_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    changes = [[torch.randn(shape, generator=generator) for shape in SHAPES.values()] for _ in range(30)]

    def body(rank: Rank) -> Tensor:
        for change in changes:
            rank.step(change)
        rank.engine.meet()
        return rank.flat

    reference = torch.zeros(sum(torch.Size(s).numel() for s in SHAPES.values()), dtype=torch.float64)
    for change in changes:
        reference -= flat(change).double()
    (ended,) = run(world(1), body)
    torch.testing.assert_close(ended.double(), reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("compressor", [BF16(), BlockInt8(block=8), BlockInt4(block=8), Sign(block=8)])
def test_what_a_compressor_has_not_sent_is_kept_and_nothing_else_is_missing(compressor: Any) -> None:
    ranks = world(3, codec_for(compressor))

    def body(rank: Rank) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank.rank)
        total = torch.zeros(rank.flat.numel())
        for _ in range(15):
            change = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
            total += flat(change)
            rank.step(change)
        rank.engine.meet()
        layout, client = rank.engine.layout, rank.engine._client
        assert client is not None
        assert client.residual is not None
        kept = torch.cat([v.reshape(-1) for v in layout.views(client.residual)])
        held = torch.cat([v.reshape(-1) for v in layout.views(rank.engine.replica.fetched)])
        return total, kept, held

    results = run(ranks, body)
    expected = -sum((total.double() - kept.double()) for total, kept, _ in results)
    for _, _, held in results:
        torch.testing.assert_close(held.double(), expected, atol=1e-4, rtol=0)
        assert torch.equal(held, results[0][2]), "all read the same bits at a meeting"


def test_a_quorum_of_all_replicas_moves_by_their_mean_and_keeps_local_progress_until_then() -> None:
    ranks = world(2, rule=Quorum(quorum=2, grace=0.0, weigh_by="equal"))

    def body(rank: Rank) -> Tensor:
        rank.step([torch.full(s, float(rank.rank + 1)) for s in SHAPES.values()])
        rank.engine.meet()
        return rank.flat

    for ended in run(ranks, body):
        assert torch.equal(ended, torch.full_like(ended, -1.5))


def test_delayed_nesterov_and_elastic_averaging_run_in_the_engine() -> None:
    for rule in (DelayedNesterov(lr=1.0, momentum=0.5, period=2), Elastic(alpha=0.25)):
        ranks = world(2, rule=rule, weight=0.5)
        for _, held in run(ranks, lambda r: train(r, 10, seed=3)):
            assert bool(held.isfinite().all())
            assert bool(held.abs().sum() > 0), rule


def test_elastic_averaging_pulls_replica_and_centre_towards_each_other() -> None:
    ranks = world(1, rule=Elastic(alpha=0.25), blocking=True)

    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        rank.step([torch.full(s, 8.0) for s in SHAPES.values()])
        rank.engine.meet()
        return rank.flat, rank.engine.replica.fetched.clone()

    ((local, centre),) = run(ranks, body)
    assert torch.equal(local, torch.full_like(local, -6.0)), "x + alpha (centre - x)"
    assert torch.equal(centre, torch.full_like(centre, -2.0)), "centre - alpha (centre - x)"


def test_inf_or_nan_is_not_sent_and_names_the_parameter_and_the_rank() -> None:
    ranks = world(2)

    def body(rank: Rank) -> None:
        bad = [torch.zeros(s) for s in SHAPES.values()]
        if rank.rank == 1:
            bad[1][3] = float("nan")
        rank.step(bad)
        rank.engine.meet()

    with pytest.raises(NonFiniteError, match=r"'first.bias' holds inf or NaN on rank 1"):
        run(ranks, body)
    assert all(bool(r.engine.owner.shard.values.isfinite().all()) for r in ranks)


def test_a_rank_with_another_model_is_named_before_anything_starts() -> None:
    ranks = world(1)
    cards = [ranks[0].engine.card, "0123456789abcdef tcp://127.0.0.1:1"]
    try:
        with pytest.raises(ValueError, match=r"Ranks \[1\] have other trained parameters than rank 0"):
            ranks[0].engine.connect(cards)
    finally:
        ranks[0].engine.close()


def test_exchanges_that_are_due_while_one_is_under_way_are_counted_and_not_lost() -> None:
    ranks = world(2)
    for rank in ranks:
        rank.engine.pause = lambda: 0.05

    def body(rank: Rank) -> dict[str, float]:
        for _ in range(10):
            rank.step([torch.ones(s) for s in SHAPES.values()])
        rank.engine.meet()
        return rank.engine.report()

    for report in run(ranks, body):
        assert report["coalesced"] > 0
        assert report["achieved_period"] > 1
    assert all(torch.equal(r.flat, torch.full_like(r.flat, -20.0)) for r in ranks)


class Proxy:
    """A connection that can be cut: forwards whatever comes to `port` to `target`."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                sink.sendall(data)

    def cut(self) -> None:
        self.cuts += bool(self._open)
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open = []

    def close(self) -> None:
        self._listener.close()
        self.cut()


def test_a_connection_that_is_cut_again_and_again_loses_nothing_and_repeats_nothing() -> None:
    proxies: list[Proxy] = []

    def through(endpoint: str) -> str:
        proxies.append(Proxy(endpoint))
        return proxies[-1].endpoint

    ranks = world(2, through=through)
    over = threading.Event()

    def scissors() -> None:
        dice = random.Random(1)
        while not over.wait(0.1 + 0.2 * dice.random()):
            for proxy in proxies:
                proxy.cut()

    cutter = threading.Thread(target=scissors, daemon=True)
    cutter.start()
    try:
        results = run(ranks, lambda r: train(r, 40, seed=4, slow=0.1))
    finally:
        over.set()
        cutter.join()
        for proxy in proxies:
            proxy.close()
    expected = -sum(total for total, _ in results)
    for _, held in results:
        assert torch.equal(held, expected)
    assert sum(proxy.cuts for proxy in proxies) > 3, "nothing was cut"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_hundred_starts_and_ends_leave_no_thread_descriptor_or_port() -> None:
    def cycle(seed: int) -> None:
        run(world(2), lambda r: train(r, 2, seed))

    cycle(0)
    gc.collect()
    before = descriptors(), threading.active_count()
    for seed in range(100):
        cycle(seed)
    gc.collect()
    assert (descriptors(), threading.active_count()) == before


def test_what_is_saved_at_a_meeting_goes_on_as_if_nothing_had_happened() -> None:
    def first(rank: Rank) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], list[Tensor]]:
        train(rank, 5, seed=1)
        tensors = {k: {n: t.clone() for n, t in kind.items()} for k, kind in rank.engine.tensors().items()}
        saved = rank.engine.numbers(), tensors, [p.clone() for p in rank.params]
        train(rank, 5, seed=2)
        return saved

    def again(rank: Rank) -> Tensor:
        numbers, tensors, params = saved[rank.rank]
        for p, kept in zip(rank.params, params, strict=True):
            p.copy_(kept)
        rank.engine.load(numbers, tensors)
        train(rank, 5, seed=2)
        return rank.flat

    terms: dict[str, Any] = {
        "bound": 0, "blocking": True, "weight": 0.3, "rule": DelayedNesterov(lr=0.7, momentum=0.9, period=2)
    }  # fmt: skip
    ranks = world(2, **terms)
    saved = run(ranks, first)
    for rank, ended in zip(ranks, run(world(2, **terms), again), strict=True):
        assert torch.equal(ended, rank.flat)
