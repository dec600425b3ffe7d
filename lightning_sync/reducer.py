"""Drives compressors over wires: the path a bucket of gradients takes from one rank's values to everyone's mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sync.aggregators.base import Aggregator
from lightning_sync.aggregators.mean import Mean
from lightning_sync.aggregators.weighted_mean import is_weighted
from lightning_sync.comm.groups import Wires
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.route import Route
from lightning_sync.rounds import drive, drive_each
from lightning_sync.state import Cover, ParamSpec, State
from lightning_sync.two_level import Shares, TwoLevelPlan
from lightning_sync.weights import Contribution, Weight, WeightDoubt


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
        part: This rank's weight over the sum of all, 1/N as long as `weigh` has not been called.
        weighings: Calls of `weigh` per reduction of all parameters, for the prediction of bytes.
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
        self.weighings = int(is_weighted(self.aggregator))
        self._weights = wires.world.size if _asks_who(self.aggregator) else 1
        assigned = [(carrier(c, self.aggregator), members) for c, members in route.assign(self.params)]
        whole = not self.aggregator.coordinate_wise
        self._shares = Shares.plan(assigned, wires.intra.topology, whole=whole) if wires.intra is not None else None
        outer = wires.inter or wires.world
        self._share: Weight = 1.0 / wires.world.size
        self.part: Weight = self._share
        self._rank_shares = torch.full((wires.world.size,), 1 / wires.world.size, dtype=torch.float64)
        self._members = [[rank] for rank in range(wires.world.size)]
        self._doubt: WeightDoubt | None = None
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
        self._members = [[] for _ in range(self.wires.world.size)]
        for ranks in replicas:
            self._members[ranks[0]] = list(ranks)
        shares = [1 / len(replicas) if ranks else 0.0 for ranks in self._members]
        self._set_shares(shares[self.wires.world.rank], shares)

    def weigh(self, own: Contribution, known: Sequence[float] | None = None, *, on_host: bool = False) -> Weight:
        r"""Agree on what each rank's values count for, until the next call (collective, unless `known`).

        With weights :math:`W_r`, values are multiplied by :math:`u_r / \sum_s W_s`, see `Contribution`; those of a rank
        without weight become zero, whatever they hold. One number travels, or, for an aggregator that has to know who
        takes part, one per rank. If no rank has any weight, nothing is changed.

        Args:
            own: What this rank brings.
            known: The weights of all ranks, where nobody has to be asked.
            on_host: Return a number also on a GPU, for which the host stops.

        Returns:
            :math:`\sum_s W_s`; on a GPU a tensor, for which the host need not stop.

        Raises:
            ValueError: on a GPU, for the weights of the step before, if they were not what weights can be.
        """
        wire, device = self.wires.world, self.params[0].device
        if known is None:
            wide = torch.float32 if device.type == "mps" else torch.float64
            weights = torch.zeros(self._weights, dtype=wide, device=device)
            weights[wire.rank if self._weights > 1 else 0] = own.weight
            wire.round([Payload("sum", (weights,))])
            if device.type != "cpu" and self._weights == 1 and not on_host:
                return self._weigh_there(own, weights)
            known = weights.tolist()  # on the CPU, or for an aggregator that works on the host with these numbers
        total = sum(known)
        if total > 0:
            shares = [sum(known[r] for r in ranks) / total for ranks in self._members] if len(known) > 1 else None
            mine = self._members[wire.rank]
            unit = own.unit if shares is None or mine == [wire.rank] else sum(known[r] for r in mine)
            self._set_shares(unit / total, shares)
            self.part = own.weight / total if shares is None else shares[wire.rank]
        return total

    def _weigh_there(self, own: Contribution, total: Tensor) -> Tensor:
        if self._doubt is not None:
            self._doubt.settle()
        self._doubt = WeightDoubt(own, total, self.wires.world.rank, self.step)
        self._set_shares(torch.where(total > 0, own.unit / total, 0.0).reshape(()), None)
        self.part = own.weight / total
        return total

    def _set_shares(self, share: Weight, shares: Sequence[float] | None) -> None:
        """Use this rank's factor, and all ranks' shares where the aggregator looks at them."""
        self._share = share
        if shares is not None:
            self._rank_shares = torch.tensor(shares, dtype=torch.float64)
        for state in self.states():
            if self._shares is None:
                # What cannot be handed on as a number is done in `_prepare`.
                state.share = 1.0 if isinstance(share, Tensor) else share
                state.shares = None if shares is None else self._rank_shares
            elif shares is not None:
                nodes = self.wires.world.topology.by_node().values()
                state.shares = torch.stack([self._rank_shares[list(ranks)].sum() for ranks in nodes])

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        """Multiply by a share that compressors cannot be given: one on a device, or 0, for which NaN is zero, too."""
        share = self._share
        if isinstance(share, Tensor):
            torch._foreach_mul_(list(tensors), share.to(torch.promote_types(tensors[0].dtype, torch.float32)))
            for t in tensors:
                t.masked_fill_(share == 0, 0)
        elif share == 0:
            torch._foreach_zero_(list(tensors))

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
        self._prepare(tensors)
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
                self._prepare(tensors)
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
        total += view.all_reduce(8 * self._weights * self.weighings)
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
        share = 1.0 if isinstance(self._share, Tensor) else self._share  # 0 times zeros, made in `_prepare`
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


def _asks_who(aggregator: Aggregator) -> bool:
    """Whether it matters which ranks take part, beside what their contributions add up to."""
    return not aggregator.linear or type(aggregator).gain is not Aggregator.gain


def _needs(aggregator: Aggregator) -> str:
    return "every rank's contribution" + ("" if aggregator.coordinate_wise else " to whole parameters")


def _copy(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    pairs = [(t, r) for t, r in zip(tensors, results, strict=True) if t is not r]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [r for _, r in pairs])
