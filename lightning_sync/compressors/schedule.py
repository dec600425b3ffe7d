"""Another compressor from some step on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Reduction
from lightning_sync.state import Arena, Cover, ParamSpec, State

Phases = Sequence[tuple[int, Compressor]]


@dataclass(frozen=True)
class Schedule(Compressor):
    """Compressors by step: ``Schedule([(0, "none"), (300, "int4")])`` sends 300 steps exactly first.

    What a compressor still owes when the next one takes over is added to what that one sends: with error feedback on
    all of them the sums telescope over the change as well. Error feedback is wrapped around the biased ones by default,
    as everywhere. Bytes, bias and memory are those of the compressor in use; memory of one that is over is given back.

    Only parameters that all of the compressors accept are compressed; the others travel exactly all the time. A
    parameter is cut between ranks only where all of them allow it.

    Args:
        phases: Pairs of a first step and a compressor or its name, from step 0 upwards. A step is one attempted step,
            as everywhere. A longer start with little or no compression: more bytes, and early gradients, which change
            direction quickly and tell the optimiser their size, arrive in time.

    Raises:
        ValueError: for phases that are not pairs, do not start at 0, or are not in order.
        TypeError: for a phase that is no compressor.
    """

    phases: Phases

    def __post_init__(self) -> None:
        from lightning_sync.compressors import registry  # here: the registry knows this module's neighbours

        phases = self.phases
        if not phases or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in phases):
            raise ValueError(f"Schedule(phases={phases!r}): expected pairs of a first step and a compressor.")
        steps = [step for step, _ in phases]
        whole = all(isinstance(s, int) and not isinstance(s, bool) for s in steps)
        if not whole or steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)):
            raise ValueError(f"Schedule(phases={phases!r}): first steps must be integers that start at 0 and rise.")
        made = tuple((step, registry.build(compressor)) for step, compressor in phases)
        for _, compressor in made:
            if not isinstance(compressor, Compressor) or isinstance(compressor, Schedule):
                raise TypeError(
                    f"Schedule: {compressor!r} is no compressor by itself. Use Route([(rule, Schedule(...))])."
                )
        object.__setattr__(self, "phases", made)  # names become compressors

    @override
    def rebuilt(self, change: Callable[[Compressor], Compressor]) -> Compressor:
        return replace(self, phases=tuple((step, change(c)) for step, c in self.phases))

    @property
    @override
    def alignment(self) -> int | None:  # type: ignore[override]
        found = [c.alignment for _, c in self.phases]
        return None if None in found else math.lcm(*cast("list[int]", found))

    @property
    @override
    def aggregates(self) -> bool:  # type: ignore[override]
        return all(c.aggregates for _, c in self.phases)

    @property
    @override
    def by_parameter(self) -> bool:  # type: ignore[override]
        return all(c.by_parameter for _, c in self.phases)

    @override
    def exchanged(self) -> Compressor | None:
        found = [(step, c.exchanged()) for step, c in self.phases]
        return None if any(c is None for _, c in found) else replace(self, phases=cast("Phases", found))

    @override
    def accepts(self, param: ParamSpec) -> bool:
        return all(c.accepts(param) for _, c in self.phases)

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        state = State(tuple(params))
        parts = [c.init(params) for _, c in self.phases]
        state.cache["parts"] = parts
        for i, part in enumerate(parts):
            # The names of a schedule's state say whose it is: two phases may keep blocks of different sizes.
            state.arenas.update({_kind(i, kind): arena for kind, arena in part.arenas.items()})
            state.lazy.update({_kind(i, kind): _lazy(part, kind) for kind in part.lazy})
            state.undelivered.update({_kind(i, kind): _cover(part, kind) for kind in part.undelivered})
        return state

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        state.declare()
        now = self._phase(state.step)
        parts = cast("list[State]", state.cache["parts"])
        part = parts[now]
        _follow(part, state)
        owed = [self._collect(parts[:now], key, state) for key in keys] if state.share else []
        if not any(o is not None for o in owed):
            return (yield from self.phases[now][1].reduce(keys, tensors, part))
        wide = [_with(t, o, state.share) for t, o in zip(tensors, owed, strict=True)]
        results = yield from self.phases[now][1].reduce(keys, wide, part)
        torch._foreach_copy_(list(tensors), list(results))
        return tensors

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        phase = len(self.phases) - 1 if step is None else self._phase(step)
        return self.phases[phase][1].wire_bytes(params, topology, step)

    def _phase(self, step: int) -> int:
        return sum(first <= step for first, _ in self.phases) - 1

    def _collect(self, over: Sequence[State], key: str, state: State) -> Tensor | None:
        """Take what phases that are over still owe to a parameter on this rank, in units of the mean."""
        total = None
        for part in over:
            for kind, cover in part.undelivered.items():
                arena = part.arenas.get(kind)
                if arena is None or key not in arena:
                    continue
                spec = state.spec(key)
                if total is None:
                    total = torch.zeros(spec.numel, dtype=arena.dtype, device=arena.device)
                places, real = (t.to(arena.device) for t in cover(part, key).elements())
                total.index_add_(0, places[real] - (spec.start or 0), arena[key][real])
            for arena in part.arenas.values():
                arena.forget(key)
        return total


def _kind(phase: int, kind: str) -> str:
    return f"{kind} {phase}"


def _follow(part: State, state: State) -> None:
    """A phase's state knows what the whole one knows."""
    part.rank, part.world_size, part.seed, part.step = state.rank, state.world_size, state.seed, state.step
    part.share, part.shares, part.aggregator = state.share, state.shares, state.aggregator


def _lazy(part: State, kind: str) -> Callable[[State], Arena]:
    def make(state: State) -> Arena:
        _follow(part, state)
        part.declare()
        return part.arenas[kind]

    return make


def _cover(part: State, kind: str) -> Callable[[State, str], Cover]:
    def cover(state: State, key: str) -> Cover:
        _follow(part, state)
        return part.undelivered[kind](part, key)

    return cover


def _with(tensor: Tensor, owed: Tensor | None, share: float) -> Tensor:
    if owed is None:
        return tensor
    return tensor.to(owed.dtype) + owed.view(tensor.shape) / share
