"""N virtual replicas in one process: the same compressors, the same driver, no network.

Algorithms are tested here, where a hundred ranks cost nothing and every run can be replayed. It is also the
reference for the real wire: both must give the same results from the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.state import Combiner, ParamSpec, State


def combine(payloads: Sequence[Payload]) -> list[Payload]:
    """What each of the N ranks gets back when rank r sends `payloads[r]`."""
    first = payloads[0]
    columns = [[p.tensors[i] for p in payloads] for i in range(len(first.tensors))]
    if first.pattern == "sum":
        for column in columns:
            total = torch.stack(column).sum(0)
            for tensor in column:
                tensor.copy_(total)
        return list(payloads)
    if first.pattern == "gather":
        return [replace(p, tensors=tuple(torch.cat(c) for c in columns)) for p in payloads]
    parts = [[t.split(list(first.splits)) for t in c] for c in columns]
    return [
        replace(first, tensors=tuple(torch.stack([t[owner] for t in part]) for part in parts))
        for owner in range(len(payloads))
    ]


@dataclass
class SimulatedWorld:
    """N ranks that reduce in lock-step.

    Args:
        compressor: What they send.
        params: Their parameters.
        world_size: N.
        seed: Seed of the compressors' private generators.
        record: Keep copies of everything that is sent, in `sent`.
        aggregator: How contributions become one; `None`: the mean.

    Attributes:
        states: One `State` per rank.
        payload_bytes: Bytes each rank handed over in the last `reduce`, by pattern.
        sent: With `record`, the payloads of the last `reduce`: ``sent[round][rank]``.
    """

    compressor: Compressor
    params: Sequence[ParamSpec]
    world_size: int
    seed: int = 0
    record: bool = False
    aggregator: Combiner | None = None

    def __post_init__(self) -> None:
        self.states: list[State] = []
        self.sent: list[list[Payload]] = []
        self.payload_bytes: dict[str, int] = {}
        for rank in range(self.world_size):
            state = self.compressor.init(self.params)
            state.rank, state.world_size, state.seed = rank, self.world_size, self.seed
            state.share = 1 / self.world_size
            state.aggregator = self.aggregator
            self.states.append(state)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Give every rank another share than 1/N from now on; they add up to 1."""
        for state, share in zip(self.states, shares, strict=True):
            state.share, state.shares = share, torch.tensor(shares, dtype=torch.float64)

    def reduce(self, tensors: Sequence[Sequence[Tensor]], keys: Sequence[str] | None = None) -> list[Sequence[Tensor]]:
        """Reduce `tensors[rank][parameter]`; inputs are left alone. Returns the result of every rank."""
        names = list(keys) if keys is not None else [p.key for p in self.params]
        runs: list[Reduction] = [
            self.compressor.reduce(names, [t.clone() for t in mine], state)
            for mine, state in zip(tensors, self.states, strict=True)
        ]
        self.payload_bytes = {}
        self.sent = []
        results: list[Sequence[Tensor]] = []
        answers: list[Payload | None] = [None] * self.world_size
        while not results:
            sent: list[Payload] = []
            for run, answer in zip(runs, answers, strict=True):
                try:
                    sent.append(next(run) if answer is None else run.send(answer))
                except StopIteration as stop:
                    gain = 1.0 if self.aggregator is None else self.aggregator.gain(self.states[0].all_shares)
                    results.append([t * gain for t in stop.value])
            if sent:
                if self.record:
                    self.sent.append([replace(p, tensors=tuple(t.clone() for t in p.tensors)) for p in sent])
                nbytes = sum(t.nbytes for t in sent[0].tensors)
                self.payload_bytes[sent[0].pattern] = self.payload_bytes.get(sent[0].pattern, 0) + nbytes
                answers = list(combine(sent))
        for state in self.states:
            state.step += 1
        return results
