"""Measures what predictions start from: links, and what compressors cost on the parameters at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sync.comm.groups import Wires
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors.base import Compressor, Payload
from lightning_sync.compressors.route import Route
from lightning_sync.planner.predict import Link
from lightning_sync.state import ParamSpec, State


def measure_link(wire: GroupWire, device: torch.device, seconds: float = 1.0) -> Link:
    """Time all-reduces on a group (collective on it).

    A first one of 1 MB tells how many bytes take about `seconds`; then one of so many (64 MB at most) counts.
    """
    small = _timed(wire, torch.zeros(1, device=device))
    few = min(small() for _ in range(5))
    probe = _timed(wire, torch.zeros(2**18, device=device))
    probe()
    first = probe()
    agreed = torch.tensor([first], dtype=torch.float64, device=device)
    wire.round([Payload("sum", (agreed,))])  # all must choose the same size
    mean = float(agreed) / wire.size
    numel = int(min(2**24, max(2**18, 2**18 * seconds / max(mean, 1e-6))))
    large = _timed(wire, torch.zeros(numel, device=device))
    large()
    took = min(large() for _ in range(2))
    cost = wire.topology.all_reduce(4 * numel)
    between_nodes = len(set(wire.topology.nodes)) > 1
    nbytes = float(cost.network if between_nodes and cost.network else cost.sent)
    return Link(nbytes / max(took - few, 1e-9), few)


def measure_links(wires: Wires, device: torch.device) -> tuple[Link, Link | None]:
    """Between nodes (or, on a single one, between its ranks), and inside nodes where reductions have two levels.

    With several ranks per node all of them use the interface at once, as they do in a reduction: the rate is the
    node's, what one rank gets times the ranks of the node.
    """
    if wires.intra is None or wires.inter is None:
        return measure_link(wires.world, device), None
    within = measure_link(wires.intra, device)
    between = measure_link(wires.inter, device)
    return Link(between.bytes_per_second * wires.intra.size, between.round_seconds), within


@dataclass(frozen=True)
class CodecTime:
    """One rank's work for one reduction of all parameters.

    Attributes:
        encode: Seconds until the first payload is there.
        owner: Seconds of what lies between two rounds.
        decode: Seconds after the last round.
        rounds: Collectives, one after the other.
        payload_bytes: What was handed to them (of a second round that passes on the first, once).
    """

    encode: float
    owner: float
    decode: float
    rounds: int
    payload_bytes: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.encode + self.owner + self.decode


class CodecRun:
    """Reductions of one rank, the first of N, answered as if all ranks sent what it sends.

    Args:
        compressor: What is timed.
        tensors: Its input, by parameter; may be overwritten.
        ranks: N.
        clock: `time.perf_counter` for wall time, `time.thread_time` for processor time.
    """

    def __init__(
        self,
        compressor: Compressor,
        tensors: Sequence[Tensor],
        ranks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        params = [ParamSpec(f"p{i}", tuple(t.shape), t.dtype, t.device) for i, t in enumerate(tensors)]
        self.compressor, self.tensors, self.ranks, self.clock = compressor, list(tensors), ranks, clock
        self.keys = [p.key for p in params]
        self.state: State = compressor.init(params)
        self.state.world_size, self.state.share = ranks, 1 / ranks

    def step(self) -> CodecTime:
        """One reduction."""
        run = self.compressor.reduce(self.keys, list(self.tensors), self.state)
        times: list[float] = []
        reply: Payload | None = None
        payload = 0
        while True:
            start = self._now()
            try:
                sent = next(run) if reply is None else run.send(reply)
            except StopIteration:
                times.append(self._now() - start)
                break
            times.append(self._now() - start)
            if sent.pattern != "gather" or not payload:
                payload += sum(t.nbytes for t in sent.tensors)
            reply = answer(sent, self.ranks)
        self.state.step += 1
        return CodecTime(times[0], sum(times[1:-1]), times[-1], len(times) - 1, payload)

    def _now(self) -> float:
        if self.tensors and self.tensors[0].device.type == "cuda":
            torch.cuda.synchronize()  # a measurement; nothing in training does this
        return self.clock()


def answer(payload: Payload, ranks: int) -> Payload:
    """What this rank, the first, would be sent back if all sent the same."""
    if payload.pattern == "sum":
        return payload
    if payload.pattern == "exchange":
        parts = [t[: payload.splits[0]] for t in payload.tensors]
        return Payload("exchange", tuple(torch.stack([p] * ranks) for p in parts), payload.splits)
    total = sum(payload.splits)
    parts = [t.repeat(-(-total // max(1, len(t))), *[1] * (t.dim() - 1))[:total] for t in payload.tensors]
    return Payload("gather", tuple(parts), payload.splits)


def measure_codec(route: Route, params: Sequence[ParamSpec], ranks: int, rounds: int = 3) -> tuple[float, int]:
    """Seconds of wall time that one reduction of these parameters costs a rank, without the wire; and its rounds.

    After any warm-up of the compressors. The best of `rounds`, since what disturbs a measurement only adds to it.
    """
    seconds, deepest = 0.0, 0
    for compressor, members in route.assign(params):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in members]
        run = CodecRun(compressor, tensors, ranks)
        run.state.step = 10**6
        run.step()
        times = [run.step() for _ in range(rounds)]
        seconds += min(t.seconds for t in times)
        deepest = max(deepest, times[0].rounds)
    return seconds, deepest


def _timed(wire: GroupWire, tensor: Tensor) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        wire.round([Payload("sum", (tensor,))])
        if tensor.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return run
