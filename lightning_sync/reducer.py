"""Drives compressors over wires: the path a bucket of gradients takes from one rank's values to everyone's mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sync.aggregators.base import Aggregator
from lightning_sync.aggregators.mean import Mean
from lightning_sync.comm.groups import Wires
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.comm.wire import Wire
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.route import Route
from lightning_sync.state import Cover, ParamSpec, State
from lightning_sync.two_level import Shares, TwoLevelPlan


def drive(runs: Sequence[Reduction], wire: Wire) -> list[Sequence[Tensor]]:
    """Run reductions in lock-step: round k of all of them is one `Wire.round`."""
    return next(drive_each([runs], wire))[1]


def drive_each(
    buckets: Iterable[Sequence[Reduction]], wire: Wire, depth: int = 3
) -> Iterator[tuple[int, list[Sequence[Tensor]]]]:
    """Run the reductions of several buckets, encoding some while others travel.

    At most `depth` buckets are under way. Which round is issued when depends on the number of rounds alone, never on
    timing, so all ranks issue the same collectives in the same order.

    Args:
        buckets: Reductions that go in lock-step; taken one bucket at a time, as soon as there is room for it.
        wire: The group.
        depth: More hides longer encoding, and holds more payloads.

    Yields:
        A bucket's place and what its reductions returned, as soon as they have, while others travel.
    """
    under_way: deque[tuple[_Bucket, Callable[[], list[Payload]]]] = deque()
    done: list[tuple[int, list[Sequence[Tensor]]]] = []

    def advance(bucket: _Bucket, answers: list[Payload] | None) -> None:
        payloads = bucket.next_round(answers)
        if payloads:
            under_way.append((bucket, wire.start(payloads)))
        else:
            done.append((bucket.place, bucket.results))

    for place, runs in enumerate(buckets):
        while len(under_way) >= depth:
            bucket, finish = under_way.popleft()
            advance(bucket, finish())
        advance(_Bucket(place, runs), None)
        yield from done  # after the next bucket is on its way
        done.clear()
    while under_way:
        bucket, finish = under_way.popleft()
        advance(bucket, finish())
        yield from done
        done.clear()


class _Bucket:
    """Reductions in lock-step, and what those that have ended returned."""

    def __init__(self, place: int, runs: Sequence[Reduction]) -> None:
        self.place = place
        self.results: list[Sequence[Tensor]] = [()] * len(runs)
        self._runs = list(enumerate(runs))

    def next_round(self, answers: Sequence[Payload] | None) -> list[Payload]:
        """Send every reduction its answer of the last round (`None`: start it); returns what they emit next."""
        payloads, still = [], []
        for place, (i, run) in enumerate(self._runs):
            try:
                payloads.append(next(run) if answers is None else run.send(answers[place]))
                still.append((i, run))
            except StopIteration as stop:
                self.results[i] = stop.value
        self._runs = still
        return payloads


@dataclass
class _Served:
    """A compressor with the state of the parameters it serves."""

    compressor: Compressor
    state: State


class Reducer:
    """Reduces gradients, or any tensors that belong to parameters, to one over the ranks: their mean, by default.

    Args:
        params: All parameters that will be reduced, in registration order.
        route: Which compressor serves which of them.
        wires: The groups; two-level when they hold an `intra` and an `inter` wire.
        aggregator: How contributions become one; the mean by default.
        seed: Seed of compressors' private generators, the same on all ranks.

    Attributes:
        step: Attempted steps so far; set by the caller, the same on all ranks.
    """

    def __init__(
        self,
        params: Sequence[ParamSpec],
        route: Route,
        wires: Wires,
        aggregator: Aggregator | None = None,
        seed: int = 0,
    ) -> None:
        self.params = tuple(params)
        self.wires = wires
        self.route = route
        self.aggregator = aggregator or Mean()
        self.step = 0
        assigned = [(carrier(c, self.aggregator), members) for c, members in route.assign(self.params)]
        whole = not self.aggregator.coordinate_wise
        self._shares = Shares.plan(assigned, wires.intra.topology, whole=whole) if wires.intra is not None else None
        outer = wires.inter or wires.world
        self._rank_shares = torch.full((wires.world.size,), 1 / wires.world.size, dtype=torch.float64)
        self._served: list[_Served] = []
        self._serves: dict[str, int] = {}
        for i, (compressor, members) in enumerate(assigned):
            mine = members if self._shares is None else self._shares.pieces(members)
            state = compressor.init(mine)
            state.rank, state.world_size, state.seed = outer.rank, outer.size, seed
            state.share = 1.0 if self._shares is not None else 1.0 / outer.size
            state.aggregator = self.aggregator
            self._served.append(_Served(compressor, state))
            self._serves.update((p.name, i) for p in members)
        self._buckets: dict[tuple[str, ...], list[tuple[_Served, list[int]]]] = {}
        self._plans: dict[tuple[str, ...], TwoLevelPlan] = {}

    def count_once(self, replicas: Sequence[Sequence[int]]) -> None:
        """Let the ranks of a replica, which send the same, be one contribution to an aggregator that is no sum."""
        if self.aggregator.linear or self._shares is not None or all(len(ranks) == 1 for ranks in replicas):
            return
        self._rank_shares = torch.zeros(self.wires.world.size, dtype=torch.float64)
        self._rank_shares[[ranks[0] for ranks in replicas]] = 1 / len(replicas)
        for state in self.states():
            state.shares, state.share = self._rank_shares, float(self._rank_shares[state.rank])

    def reduce(self, names: Sequence[str], tensors: Sequence[Tensor], unused: Sequence[str] = ()) -> None:
        """Replace every tensor by the result over the ranks (collective: same names, same order, on all ranks).

        Args:
            names: Parameters of this bucket.
            tensors: This rank's values, one per name, of one dtype; overwritten.
            unused: Parameters that no rank used in this step. They take part, so that all ranks send the same, but
                their state stays as it was: what they would emit would be thrown away.
        """
        counters, world = self.wires.world.counters, self.wires.world.topology
        counters.count_dense(world.all_reduce(sum(t.nbytes for t in tensors)))
        for served in self._served:
            served.state.step = self.step
        with ExitStack() as stack:
            for served in self._served:
                keys = [p.key for p in served.state.params if p.name in unused]
                if keys:
                    stack.enter_context(served.state.held(keys))
            if self.wires.intra is None:
                self._reduce_flat(names, tensors)
            else:
                self._reduce_two_level(names, tensors)

    def reduce_all(self, buckets: Iterable[tuple[Sequence[str], Sequence[Tensor]]]) -> None:
        """As `reduce` for every bucket, names and tensors, but encoding some while others travel (collective).

        What comes out is the same, whatever the buckets. With two levels they travel one after the other.
        """
        for _ in self.reduce_each(buckets):
            pass

    def reduce_each(self, buckets: Iterable[tuple[Sequence[str], Sequence[Tensor]]]) -> Iterator[int]:
        """As `reduce_all`, but yields the place of every bucket whose means are there (collective).

        Whatever makes the buckets, and whatever is done with the means, takes no time of its own while others travel.
        """
        if self.wires.intra is not None:
            for place, (names, tensors) in enumerate(buckets):
                self.reduce(names, tensors)
                yield place
            return
        counters, world = self.wires.world.counters, self.wires.world.topology
        for served in self._served:
            served.state.step = self.step
        under_way: dict[int, list[list[Tensor]]] = {}

        def runs() -> Iterator[list[Reduction]]:
            for place, (names, tensors) in enumerate(buckets):
                plan = self._bucket(tuple(names))
                counters.count_dense(world.all_reduce(sum(t.nbytes for t in tensors)))
                under_way[place] = [[tensors[i] for i in members] for _, members in plan]
                yield self._runs(plan, names, tensors)

        for place, results in drive_each(runs(), self.wires.world):
            for targets, result in zip(under_way.pop(place), results, strict=True):
                self._write(targets, result)
            yield place

    def any(self, flags: Tensor) -> Tensor:
        """Element-wise maximum over the ranks of an integer tensor, in place (collective): "does any rank say 1"."""
        if self.wires.intra is None or self.wires.inter is None:
            return self.wires.world.any(flags)
        return self.wires.inter.any(self.wires.intra.any(flags))

    def predicted_bytes(self, step: int | None = None, *, rank: int | None = None) -> Bytes:
        """What a rank (this one by default) sends in one step; step `None`: after any warm-up of the compressors."""
        world = self.wires.world.topology
        view = world if rank is None else Topology(rank, world.nodes)
        pieces: list[Sequence[ParamSpec]] = [s.state.params for s in self._served]
        total, outer = Bytes(), view
        if self._shares is not None:
            total, outer = self._shares.intra_bytes(view.intra()), view.inter()
            pieces = [self._shares.pieces(members, view.intra().rank) for members in self._shares.members]
        for served, params in zip(self._served, pieces, strict=True):
            total += served.compressor.wire_bytes(params, outer, step) + self.aggregator.wire_bytes(len(params), outer)
        return total

    def interface_bytes(self, step: int | None = None) -> int:
        """Predicted bytes per step through this node's network interface (all bytes sent, if there is one node)."""
        world = self.wires.world.topology
        if len(set(world.nodes)) == 1:
            return round(self.predicted_bytes(step).sent)
        return round(sum(self.predicted_bytes(step, rank=r).network for r in world.intra_ranks()))

    def bf16_interface_bytes(self) -> int:
        """The same for a plain bf16 ring all-reduce: what every compressor has to beat."""
        world = self.wires.world.topology
        nbytes = 2 * sum(p.numel for p in self.params)
        if len(set(world.nodes)) == 1:
            return round(world.all_reduce(nbytes).sent)
        return round(sum(Topology(r, world.nodes).all_reduce(nbytes).network for r in world.intra_ranks()))

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor the compressors keep on this rank, ``{kind: {parameter: tensor}}``."""
        merged: dict[str, dict[str, Tensor]] = {}
        for served in self._served:
            for kind, tensors in served.state.state_dict().items():
                merged.setdefault(kind, {}).update(tensors)
        return merged

    def covers(self) -> dict[str, dict[str, Cover]]:
        """Which elements the tensors of undelivered kinds stand for, ``{kind: {parameter: cover}}``."""
        merged: dict[str, dict[str, Cover]] = {}
        for served in self._served:
            for kind, covers in served.state.covers().items():
                merged.setdefault(kind, {}).update(covers)
        return merged

    def compressor_of(self, name: str) -> Compressor:
        """The compressor that serves a parameter."""
        return self._served[self._serves[name]].compressor

    def states(self) -> list[State]:
        """The compressors' states on this rank."""
        return [served.state for served in self._served]

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state_dict` returned, on the same rank of a run with the same ranks and compressors.

        Nothing is changed if any of it does not fit.

        Raises:
            ValueError: for state of a parameter that this run does not reduce, or not with a compressor that keeps any.
        """
        known = {p.key for served in self._served for p in served.state.params}
        foreign = sorted({name for tensors in state.values() for name in tensors} - known)
        if foreign:
            raise ValueError(
                f"State holds {', '.join(map(repr, foreign))}, which this run does not reduce on this rank. Load it "
                "into the same model with the same compressors, ranks and nodes, or start with fresh state."
            )
        loads = []
        for served in self._served:
            mine = {p.key for p in served.state.params}
            parts = {kind: {n: t for n, t in tensors.items() if n in mine} for kind, tensors in state.items()}
            loads.append((served.state, {kind: tensors for kind, tensors in parts.items() if tensors}))
        for own, tensors in loads:
            own.check(tensors)
        for own, tensors in loads:
            own.load_state_dict(tensors)

    def _reduce_flat(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        bucket = self._bucket(tuple(names))
        runs = self._runs(bucket, names, tensors)
        for (_, members), result in zip(bucket, drive(runs, self.wires.world), strict=True):
            self._write([tensors[i] for i in members], result)

    def _write(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        _copy(tensors, results)
        gain = self.aggregator.gain(self._rank_shares)
        if gain != 1:
            torch._foreach_mul_(list(tensors), gain)

    def _runs(
        self, bucket: Sequence[tuple[_Served, list[int]]], names: Sequence[str], tensors: Sequence[Tensor]
    ) -> list[Reduction]:
        return [
            served.compressor.reduce([names[i] for i in members], [tensors[i] for i in members], served.state)
            for served, members in bucket
        ]

    def _reduce_two_level(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        assert self.wires.intra is not None
        assert self.wires.inter is not None
        assert self._shares is not None
        key = tuple(names)
        if key not in self._plans:
            self._plans[key] = TwoLevelPlan.make(names, self._shares)
        plan = self._plans[key]
        share = 1.0 / self.wires.world.size
        (owned,) = drive([plan.scatter(tensors, share)], self.wires.intra)
        bucket: dict[int, list[int]] = {}
        for position, piece in enumerate(plan.own):
            bucket.setdefault(self._serves[piece.name], []).append(position)
        runs = [
            self._served[i].compressor.reduce(
                [plan.own[j].key for j in members], [owned[j] for j in members], self._served[i].state
            )
            for i, members in bucket.items()
        ]
        for members, result in zip(bucket.values(), drive(runs, self.wires.inter), strict=True):
            self._write([owned[j] for j in members], result)
        drive([plan.gather(owned, tensors)], self.wires.intra)

    def _bucket(self, names: tuple[str, ...]) -> list[tuple[_Served, list[int]]]:
        if names not in self._buckets:
            table: dict[int, list[int]] = {}
            for position, name in enumerate(names):
                table.setdefault(self._serves[name], []).append(position)
            self._buckets[names] = [(self._served[i], table[i]) for i in sorted(table)]
        return self._buckets[names]


def carrier(compressor: Compressor, aggregator: Aggregator) -> Compressor:
    """The compressor that carries contributions to this aggregator in the place of `compressor`.

    Raises:
        ValueError: if there is none.
    """
    found = carried(compressor, aggregator)
    if found is None:
        raise ValueError(
            f"aggregator={aggregator!r} needs {_needs(aggregator)}, which {compressor!r} does not hand over. "
            "Use a compressor that exchanges blocks, such as 'int8', none at all, or aggregator='mean'."
        )
    return found


def carried(compressor: Compressor, aggregator: Aggregator) -> Compressor | None:
    """As `carrier`, but `None` if there is none."""
    if aggregator.linear:
        return compressor
    exchanged = compressor.exchanged()
    if exchanged is None or not (exchanged.aggregates and (aggregator.coordinate_wise or exchanged.by_parameter)):
        return None
    return exchanged


def _needs(aggregator: Aggregator) -> str:
    return "every rank's contribution" + ("" if aggregator.coordinate_wise else " to whole parameters")


def _copy(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    pairs = [(t, r) for t, r in zip(tensors, results, strict=True) if t is not r]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [r for _, r in pairs])
