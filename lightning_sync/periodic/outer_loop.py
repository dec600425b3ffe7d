"""The outer loop: deltas become one, an outer optimiser applies it to the anchor, replicas take the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors.base import Payload
from lightning_sync.nonfinite import NonFiniteError, first_nonfinite
from lightning_sync.periodic.anchor import Fragment
from lightning_sync.periodic.buffers import BufferMerge
from lightning_sync.periodic.outer import OuterFactory, build_outer, steps_apart
from lightning_sync.reducer import Reducer
from lightning_sync.weights import Contribution, Weight

OuterScheduler = Callable[[Optimizer], LRScheduler]


@dataclass
class InFlight:
    """An exchange that has started and not ended.

    Attributes:
        deltas: This rank's parameters as they were, then its differences, then the combined ones; in the fragment's
            order. Empty once the anchor has moved.
        inner_lr: The inner optimiser's learning rate at the start.
        buffers: This rank's buffers, then the merged ones; empty if they do not travel with this fragment.
        proposal: Proposed next period, then the agreed one; 0 for a fixed period.
        own: What this rank's differences count for; `None`: as much as other ranks'.
    """

    deltas: list[Tensor]
    inner_lr: float = 1.0
    buffers: dict[str, Tensor] = field(default_factory=dict)
    proposal: int = 0
    own: Contribution | None = None


class OuterLoop:
    r"""Anchor, outer optimiser and fragments of one replica.

    With a the anchor and :math:`w_r` the parameters of replica r, an exchange is

    .. math:: d = \tfrac1N \sum_r C(a - w_r), \qquad a \leftarrow \mathrm{outer}(a, d), \qquad
              w_r \leftarrow \lambda w_r + (1 - \lambda) a

    Compressors C, biased ones with their residuals, act on differences only, never on parameters. The reducer's
    aggregator stands where the mean over the replicas stands here; with weights, a replica's share is the weight of
    what it has learned from since the last exchange, over the sum of all replicas'.

    Args:
        fragments: The parameters by fragment.
        reducer: Combines deltas over all ranks; made from the fragments' specs.
        outer: See `build_outer`.
        scheduler: Makes a torch scheduler for the outer optimiser, stepped once per round of all fragments.
        buffers: How buffers become one; they travel with the last fragment.
        local_weight: lambda.
        elastic: beta of elastic averaging, `None` for none. Replicas then are pulled towards the anchor by beta/N and
            keep the rest, and the anchor moves by beta d (Zhang et al. 2015, equations 5 and 6 in their synchronous
            form): pass an outer optimiser of learning rate beta without momentum.
        replicas: N.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        reducer: Reducer,
        outer: OuterFactory | None,
        scheduler: OuterScheduler | None,
        buffers: BufferMerge,
        *,
        local_weight: float = 0.0,
        elastic: float | None = None,
        replicas: int = 1,
    ) -> None:
        self.fragments = list(fragments)
        self.reducer = reducer
        self.buffers = buffers
        self.local_weight = local_weight
        self.elastic = elastic
        self._replicas = replicas
        self.optimizer = build_outer(outer, [a for f in self.fragments for a in f.anchor])
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.merged_buffers: dict[str, Tensor] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.exchanges = 0
        self._learned: Weight = 0.0
        self._counted: dict[int, Weight] = {}
        self._names = {id(a): n for f in self.fragments for n, a in zip(f.names, f.anchor, strict=True)}
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._distances: dict[int, Tensor] = {}
        self._last_step: int | None = None
        self._steps_between: int | None = None

    @property
    def wire(self) -> GroupWire:
        """All ranks."""
        return self.reducer.wires.world

    def capture(self) -> None:
        """Agree on the parameters and buffers as they are, which must be equal on all ranks."""
        for fragment in self.fragments:
            fragment.capture()
        self.merged_buffers = self.buffers.snapshot()
        self._counted = dict.fromkeys(range(len(self.fragments)), self._learned)

    def learn(self, weight: Weight) -> None:
        """Note that this rank's parameters have learned from batches of this weight."""
        self._learned = self._learned + weight

    # ---- an exchange: start and finish on the training thread, run on the communication thread ----------------------

    def start(self, index: int, inner_lr: float, proposal: int = 0, *, weighted: bool = False) -> None:
        """Take this rank's parameters of a fragment as they are, to be exchanged while training may go on.

        Args:
            index: The fragment.
            inner_lr: The inner optimiser's learning rate now.
            proposal: This rank's proposal for the next period, 0 if that is fixed.
            weighted: Whether ranks count for what they have learned from since the last exchange of this fragment,
                instead of equally.
        """
        fragment = self.fragments[index]
        taken = fragment.snapshot(self._buffer(fragment))
        if self.elastic is not None:
            fragment.pull(self.elastic / self._replicas)
        carries = index == len(self.fragments) - 1
        own = None
        if weighted:
            own = Contribution.of_mean(float(self._learned - self._counted.get(index, 0.0)))
            self._counted[index] = self._learned
        self.in_flight[index] = InFlight(taken, inner_lr, self.buffers.snapshot() if carries else {}, proposal, own)

    def run(self, index: int, step: int) -> None:
        """Combine the differences, and apply the outer optimiser to the anchor (collective).

        Nobody may look at the anchor until this is done. All that can be done here costs the training thread nothing;
        differences are made and the anchor moved bucket by bucket, while other buckets travel.

        Raises:
            NonFiniteError: if this rank's parameters have become inf or NaN; before they are encoded.
        """
        flight, fragment = self.in_flight[index], self.fragments[index]
        self.reducer.step = step
        if any("inner_lr" in group for group in self.optimizer.param_groups):
            # Schedulers may differ between ranks; what moves the anchor must not.
            rate = torch.tensor([flight.inner_lr / self.wire.size], device=fragment.flat.device)
            self.wire.round([Payload("sum", (rate,))])
            flight.inner_lr = float(rate)
        if index == len(self.fragments) - 1:
            self._steps_between = None if self._last_step is None else step - self._last_step
            self._last_step = step
        part = None if flight.own is None else self._weigh(flight.own)
        bucketwise = steps_apart(self.optimizer)
        for place in self.reducer.reduce_each(self._differences(fragment, flight.deltas, step)):
            if bucketwise:
                self._move_anchor(flight, fragment, fragment.buckets[place])
        if not bucketwise:
            self._move_anchor(flight, fragment, range(len(fragment.anchor)))
        flight.deltas = []
        if flight.buffers:
            self.merged_buffers = flight.buffers = self.buffers.merge(flight.buffers, self.wire, part)
        if flight.proposal:
            agreed = torch.tensor([flight.proposal], dtype=torch.int64, device=fragment.flat.device)
            flight.proposal = int(self.wire.maximum(agreed))

    def _weigh(self, own: Contribution) -> Weight:
        # On a GPU this stops the host, once per exchange: where nobody has learned anything, all count alike.
        if not self.reducer.weigh(own, on_host=True):
            self.reducer.weigh(Contribution.of_mean(1.0), [1.0] * self.wire.size)
        return self.reducer.part

    def _differences(
        self, fragment: Fragment, taken: list[Tensor], step: int
    ) -> Iterator[tuple[list[str], list[Tensor]]]:
        norms: list[Tensor] = []
        for place, bucket in enumerate(fragment.buckets):
            fragment.subtract(self._buffer(fragment), place)
            names, deltas = [fragment.names[i] for i in bucket], [taken[i] for i in bucket]
            name = first_nonfinite(names, deltas)
            if name is not None:
                raise NonFiniteError(step, name, self.wire.rank, "distance from the anchor")
            norms += torch._foreach_norm(deltas)  # one pass per exchange, where parameters have just been read
            yield names, deltas
        if norms:
            self._distances[self.fragments.index(fragment)] = torch.stack(norms).norm()

    def _move_anchor(self, flight: InFlight, fragment: Fragment, members: Sequence[int]) -> None:
        for i in members:
            fragment.anchor[i].grad = flight.deltas[i]
        for group in self.optimizer.param_groups:
            if "inner_lr" in group:
                group["inner_lr"] = flight.inner_lr
        self.optimizer.step()
        for i in members:
            fragment.anchor[i].grad = None

    def finish(self, index: int, *, last: bool = False) -> int:
        """Take the anchor over; returns the agreed next period (0 if it is fixed).

        Args:
            index: The fragment.
            last: Replicas become the anchor, whatever `local_weight` and `elastic` say: the end of training.
        """
        flight, fragment = self.in_flight.pop(index), self.fragments[index]
        keep = 0.0 if last else 1.0 if self.elastic is not None else self.local_weight
        fragment.merge(keep)
        if index == len(self.fragments) - 1:
            if flight.buffers:
                self.buffers.write(flight.buffers, 0.0 if last else self.local_weight)
            self.exchanges += 1
            if self.scheduler is not None:
                self.scheduler.step()
        return flight.proposal

    def _buffer(self, fragment: Fragment) -> Tensor:
        """Room for the largest fragment's deltas; at most one exchange is in flight at a time."""
        dtype, device = fragment.flat.dtype, fragment.flat.device
        if dtype not in self._scratch:
            size = max(f.numel for f in self.fragments if f.flat.dtype == dtype)
            self._scratch[dtype] = torch.empty(size, dtype=dtype, device=device)
        return self._scratch[dtype]

    # ---- consensus and state -----------------------------------------------------------------------------------------

    def consensus(self) -> dict[str, Tensor]:
        """Anchor and merged buffers by name: what all ranks agree on."""
        values: dict[str, Tensor] = dict(self.merged_buffers)
        for fragment in self.fragments:
            values.update(zip(fragment.names, fragment.anchor, strict=True))
        return values

    def telemetry(self) -> dict[str, float | Tensor]:
        r"""What the last exchange has shown.

        ``consensus_distance`` is :math:`\|a - w_r\|_2` over all parameters, just before this replica's differences were
        combined; ``period`` the steps between the last two exchanges of all fragments.
        """
        found: dict[str, float | Tensor] = {}
        if self._distances:
            found["consensus_distance"] = torch.stack([d.float() for d in self._distances.values()]).norm()
        if self._steps_between is not None:
            found["period"] = float(self._steps_between)
        return found

    def numbers(self) -> dict[str, int | float]:
        """Counts and learning rates, and what this rank has learned from. No exchange may be running."""
        numbers: dict[str, int | float] = {"exchanges": self.exchanges, "learned": float(self._learned)}
        numbers.update({f"counted/{index}": float(weight) for index, weight in self._counted.items()})
        for i, group in enumerate(self.optimizer.param_groups):
            numbers[f"lr/{i}"] = float(group["lr"])
        for i, part in enumerate(_with_parts(self.scheduler)):
            numbers[f"scheduler/{i}"] = int(part.last_epoch)
        for index, flight in self.in_flight.items():
            numbers[f"in_flight/{index}"] = flight.proposal
        return numbers

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Anchor, outer optimiser and merged buffers, by kind and name; the same on all ranks."""
        found: dict[str, dict[str, Tensor]] = {"anchor": {}, "merged_buffers": dict(self.merged_buffers)}
        for fragment in self.fragments:
            found["anchor"].update(fragment.state_dict())
        for anchor, state in self.optimizer.state.items():
            for kind, value in state.items():
                tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                found.setdefault(f"outer/{kind}", {})[self._names[id(anchor)]] = tensor.detach().clone()
        for flight in self.in_flight.values():
            if flight.buffers:
                found["in_flight_buffers"] = dict(flight.buffers)
        return found

    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], *, outer: bool) -> None:
        """Restore what `numbers` and `tensors` returned.

        Args:
            numbers: With exchanges under way only if the fragments are the same.
            tensors: All kinds.
            outer: Whether the outer optimiser is the same, and takes its state and learning rate back.

        Raises:
            ValueError: for an anchor that does not fit.
        """
        for fragment in self.fragments:
            fragment.load_state_dict(tensors["anchor"])
        self.merged_buffers = {name: value.clone() for name, value in tensors["merged_buffers"].items()}
        self.exchanges = int(numbers["exchanges"])
        self._learned = float(numbers.get("learned", 0.0))
        counted = {k.removeprefix("counted/"): v for k, v in numbers.items() if k.startswith("counted/")}
        self._counted = {int(index): float(weight) for index, weight in counted.items()}
        by_name = {self._names[id(a)]: a for f in self.fragments for a in f.anchor}
        if outer:
            for i, group in enumerate(self.optimizer.param_groups):
                group["lr"] = numbers.get(f"lr/{i}", group["lr"])
            for i, part in enumerate(_with_parts(self.scheduler)):
                part.last_epoch = int(numbers.get(f"scheduler/{i}", part.last_epoch))
        for kind, values in tensors.items():
            if outer and kind.startswith("outer/"):
                for name, value in values.items():
                    self.optimizer.state[by_name[name]][kind.removeprefix("outer/")] = value.clone()
        for key, proposal in numbers.items():
            if key.startswith("in_flight/"):
                index = int(key.removeprefix("in_flight/"))
                carries = index == len(self.fragments) - 1
                buffers = dict(tensors.get("in_flight_buffers", {})) if carries else {}
                self.in_flight[index] = InFlight([], buffers=buffers, proposal=int(proposal))


def _with_parts(scheduler: LRScheduler | None) -> list[LRScheduler]:
    """A scheduler and those it is made of (`SequentialLR`, `ChainedScheduler`), in a fixed order."""
    if scheduler is None:
        return []
    return [scheduler, *(part for child in getattr(scheduler, "_schedulers", ()) for part in _with_parts(child))]
