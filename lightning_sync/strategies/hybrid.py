"""Hybrid: replicas train on their own and meet at intervals."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sync.aggregators import Mean
from lightning_sync.checkpoint import ModeState
from lightning_sync.checks import check_choice, check_integer, check_seconds, check_share, plain_repr
from lightning_sync.comm.groups import Wires, discover_topology, make_wires
from lightning_sync.comm.topology import Bytes
from lightning_sync.comm.worker import Promise
from lightning_sync.compressors.resolve import to_route
from lightning_sync.ddp_hook import param_specs
from lightning_sync.periodic import inner_state
from lightning_sync.periodic.anchor import Fragment
from lightning_sync.periodic.buffers import BufferMerge, BufferPolicy
from lightning_sync.periodic.fragments import Fragments, check_fragments, split
from lightning_sync.periodic.inner_state import POLICIES, InnerPolicy
from lightning_sync.periodic.outer import OuterFactory, build_outer
from lightning_sync.periodic.outer_loop import OuterLoop, OuterScheduler
from lightning_sync.periodic.pace import Pace
from lightning_sync.periodic.period import Period, Progress, as_period
from lightning_sync.periodic.schedule import Schedule
from lightning_sync.reducer import Reducer
from lightning_sync.strategies.boundary import is_last_step
from lightning_sync.strategies.remarks import say_replicas, warn_if_short
from lightning_sync.strategies.warmed import WarmedStrategy
from lightning_sync.two_level import levels
from lightning_sync.weights import Contribution


class HybridStrategy(WarmedStrategy):
    r"""Replicas step on their own and exchange what they have learned every `sync_every` steps.

    One strategy for local SGD, post-local SGD, DiLoCo, streaming DiLoCo, SlowMo, elastic averaging and hierarchical
    averaging; the names registered for these are entries with arguments. With a the anchor (the parameters that all
    last agreed on), :math:`w_r` those of replica r, C the compressor:

    .. math:: d = \tfrac1N \sum_r C(a - w_r), \qquad a \leftarrow \mathrm{outer}(a, d), \qquad
              w_r \leftarrow \lambda w_r + (1 - \lambda) a

    Between two exchanges nothing crosses the network except inside a replica. Validation and checkpoints see the
    *consensus*: the anchor, and the buffers merged at the last exchange. The last step of a run ends with an exchange,
    after which all replicas are the anchor. Parameters without gradients are left alone: one that you change yourself
    (an EMA teacher) stays each rank's own. Memory: a float32 anchor, the outer optimiser's state, a float32 buffer of
    the largest fragment, and what the compressor keeps.

    Args:
        sync_every: H, steps between two exchanges (16 by default), or a `Period`. More sends less; replicas drift
            apart further.
        sync_every_seconds: Instead of a number of steps, about this much time; measured, and agreed by all ranks.
        outer_optimizer: What the combined delta does to the anchor: `None` (it becomes the mean), `Nesterov`,
            `SlowMo`, or a function from a list of tensors to a torch optimiser.
        outer_scheduler: A function from the outer optimiser to a torch scheduler, stepped per exchange.
        fragments: Parts of the model that travel one after the other, so that the peak of bytes per step falls by
            their number: a number, or patterns for parameter names per part.
        overlap_steps: tau. An exchange starts tau steps before it takes effect, and travels while training goes on.
            0: training waits for it.
        local_weight: lambda in [0, 1]: share of the local value that is kept when an exchange takes effect. 0 drops
            what a replica has learned during the overlap, 1 never takes the anchor over.
        warmup_steps: Steps at the beginning in which gradients are reduced over all ranks, as in strict.
        elastic: beta in (0, 1] of elastic averaging, see `OuterLoop`; `None`: none.
        buffers: ``"average"`` (counts: maximum) or ``"rank0"``.
        inner_state: What becomes of the inner optimisers' state at an exchange: ``"keep"``, ``"average"`` (sends as
            much again per moment), ``"reset"``.
        anchor_device: ``"device"``, or ``"cpu"`` to keep anchor and outer optimiser in (pinned) host memory and to
            exchange over gloo. `None`: host memory where an overlapped exchange would meet other NCCL traffic.
        **kwargs: See `UnwrappedStrategy`; `replica` decides who exchanges with whom.

    Raises:
        ValueError, TypeError: for a wrong value or combination, at construction or setup.
    """

    mode = "hybrid"

    def __init__(
        self,
        *args: Any,
        sync_every: int | Period | None = None,
        sync_every_seconds: float | None = None,
        outer_optimizer: OuterFactory | None = None,
        outer_scheduler: OuterScheduler | None = None,
        fragments: Fragments = 1,
        overlap_steps: int = 0,
        local_weight: float = 0.0,
        warmup_steps: int = 0,
        elastic: float | None = None,
        buffers: BufferPolicy = "average",
        inner_state: InnerPolicy = "keep",
        anchor_device: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, warmup_steps=warmup_steps, **kwargs)
        check_seconds("HybridStrategy", sync_every_seconds=sync_every_seconds)
        check_integer("HybridStrategy", 0, overlap_steps=overlap_steps)
        check_share("HybridStrategy", local_weight=local_weight)
        check_choice("HybridStrategy", ("average", "rank0"), buffers=buffers)
        check_choice("HybridStrategy", POLICIES, inner_state=inner_state)
        check_choice("HybridStrategy", (None, "device", "cpu"), anchor_device=anchor_device)
        if elastic is not None:
            check_share("HybridStrategy", elastic=elastic)
            if outer_optimizer is not None or elastic == 0 or local_weight or self.aggregator != Mean():
                raise ValueError(
                    f"HybridStrategy(elastic={elastic!r}): above 0, without an outer_optimizer or another aggregator "
                    "than the mean, and with local_weight=0: replicas keep what elastic averaging leaves them."
                )
        if outer_scheduler is not None and not callable(outer_scheduler):
            raise ValueError(
                f"HybridStrategy(outer_scheduler={outer_scheduler!r}): expected a function from the outer optimiser "
                "to a torch scheduler."
            )
        if inner_state != "keep" and overlap_steps:
            raise ValueError(f"HybridStrategy(inner_state={inner_state!r}) needs overlap_steps=0: replicas must stand.")
        self.period = as_period(sync_every, sync_every_seconds)
        self.schedule = Schedule(self.period, check_fragments(fragments), overlap_steps)
        if outer_optimizer is not None:
            build_outer(outer_optimizer, [torch.zeros(1)])
        self.outer_optimizer = outer_optimizer
        self.outer_scheduler = outer_scheduler
        self.fragments: Fragments = fragments
        self.overlap_steps = overlap_steps
        self.local_weight = float(local_weight)
        self.elastic = elastic
        self.buffers: BufferPolicy = buffers
        self.inner_state: InnerPolicy = inner_state
        self.anchor_device = anchor_device
        self._loop: OuterLoop | None = None
        self._pending: dict[int, Promise] = {}
        self._stale: set[int] = set()
        self._pace = Pace()
        self._begun = False

    # ---- set-up ------------------------------------------------------------------------------------------------------

    @property
    def _outer_device(self) -> torch.device:
        """Where anchor and deltas live."""
        on_host = self.overlap_steps > 0 if self.anchor_device is None else self.anchor_device == "cpu"
        return torch.device("cpu") if on_host else self.root_device

    def _register_ddp_hooks(self) -> None:
        """Make groups and reducers, inside replicas and between them, and the outer loop."""
        super()._register_ddp_hooks()
        module = self.model
        assert module is not None
        named = param_specs(module)
        device = self._outer_device
        # A thread of its own where exchanges overlap with training, or else gradients would queue behind them.
        executor = self._make_executor(device) if self.overlap_steps or device != self.root_device else self._executor
        assert executor is not None
        topology = discover_topology(self.node_rank, self.root_device)
        nodes = list(topology.by_node().values())
        two_level = levels(self.two_level, linear=self.aggregator.linear, nodes_are_replicas=self._replicas == nodes)
        backend = "gloo" if device != self.root_device else None
        wires = make_wires(topology, self.counters, executor.wait, two_level, self.group_timeout, backend)
        table = {spec.name: (spec, p) for spec, p in named}
        parts = split([spec for spec, _ in named], self.fragments)
        fragments = [Fragment([table[spec.name] for spec in part], device) for part in parts]
        route = to_route(self.effective_compressor, error_feedback=self.error_feedback)
        order = {spec.name: i for i, (spec, _) in enumerate(named)}
        specs = sorted((s for f in fragments for s in f.specs), key=lambda s: order[s.name])
        self._reducer = Reducer(specs, route, wires, self.aggregator, self.seed)
        self._reducer.count_once(self._replicas)
        self._reducer.weighings *= len(fragments)
        self._loop = OuterLoop(
            fragments,
            self._reducer,
            self._outer_factory(),
            self.outer_scheduler,
            BufferMerge(module, self.buffers),
            local_weight=self.local_weight,
            elastic=self.elastic,
            replicas=len(self._replicas),
        )
        self._loop.capture()
        self._pending, self._stale, self._begun = {}, set(), False
        if self.warmup_steps:
            assert self._executor is not None
            if executor is not self._executor:  # gradients keep to their own thread and backend
                wires = make_wires(topology, self.counters, self._executor.wait, two_level, self.group_timeout)
            self._prepare_warm_up(wires)

    def _outer_factory(self) -> OuterFactory | None:
        return self.outer_optimizer if self.elastic is None else partial(torch.optim.SGD, lr=self.elastic)

    def _all_wires(self) -> list[Wires]:
        reducers = [r for r in (self._reducer, self._inner, self._warm) if r is not None]
        return list({id(r.wires): r.wires for r in reducers}.values())

    def _say_bytes(self, reducer: Reducer, per: str = "step") -> None:
        super()._say_bytes(reducer, "round of exchanges" if self.schedule.fragments > 1 else "exchange")
        say_replicas(self.mode, self._replicas, self.period, self.warmup_steps)

    def predicted_bytes(self, step: int | None = None) -> Bytes | None:
        """What this rank sends per step, exchanges spread over their period (`None` before `fit`, or if it varies)."""
        every = self.schedule.steps_per_round
        if self._reducer is None or self._inner is None or every is None:
            return None
        outer = self._reducer.predicted_bytes(step)
        return self._inner.predicted_bytes(step) + Bytes(Fraction(outer.sent, every), Fraction(outer.network, every))

    def on_train_start(self) -> None:
        """Say so if the run is too short for this mode."""
        super().on_train_start()
        trainer, every = self.attached_trainer(), self.schedule.steps_per_round
        if trainer is not None and every is not None:
            warn_if_short(trainer, every, self.warmup_steps)

    # ---- training ----------------------------------------------------------------------------------------------------

    def learned(self, own: Contribution) -> None:  # noqa: D102 - inherited
        if self._loop is not None:
            self._loop.learn(own.weight)

    def after_step(self) -> None:
        """End and start exchanges, as the schedule says."""
        loop, step = self._loop, self._step
        if loop is None or step < 0:
            return
        if step == 0:
            loop.capture()
            self._begin(0)
            return
        if not self._begun:
            self._begin(step - 1)
        self._stale.update(range(len(loop.fragments)))
        for index in self.schedule.starts(step):
            self._start(index)
        for index in self.schedule.ends(step):
            self._finish(index)
        if is_last_step(self.attached_trainer()):
            self.finish_training()

    def finish_training(self) -> None:
        """Exchange what is left, so that all replicas end as the anchor."""
        if self._loop is None or self._step <= 0:
            return
        for index in list(self._pending):
            self._finish(index)
        for index in sorted(self._stale):
            self._start(index)
            self._finish(index, last=True)

    def _begin(self, step: int) -> None:
        """Start the clocks of exchanges, `step` steps after the warm-up."""
        self._begun = True
        self._pace.mark(self.counters.steps)
        self.schedule.begin(self._progress())
        if not self.period.fixed:
            self.schedule.agreed(step, self.schedule.next_end)

    def _progress(self, then: int = 0) -> Progress:
        """Where this rank stands, once `then` more exchanges have taken effect."""
        assert self._loop is not None
        return Progress(self._loop.exchanges + then, self._inner_lr(), self._pace.seconds(self.counters.steps))

    def _inner_lr(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0

    def on_validation_start(self) -> None:
        """As the base; time spent in validation is not the time of steps."""
        self._pace.pause()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """As the base; go on counting."""
        super().on_validation_end()
        self._pace.go_on()

    def _start(self, index: int) -> None:
        loop, executor = self._loop, self._executors[-1]
        assert loop is not None
        proposal = 0 if self.period.fixed else self.schedule.propose(self._progress(then=1))
        loop.start(index, self._inner_lr(), proposal, weighted=self.weighs)
        step = self.counters.steps
        promise = executor.promise(torch.empty(0, device=self._outer_device))
        executor.submit(lambda: loop.run(index, step), [promise], f"exchange of fragment {index} at step {step}")
        self._pending[index] = promise

    def _finish(self, index: int, *, last: bool = False) -> None:
        loop = self._loop
        assert loop is not None
        self._arrive()
        del self._pending[index]
        agreed = loop.finish(index, last=last)
        if agreed:
            self.schedule.agreed(self._step, agreed)
        if last or not (self.overlap_steps or self.local_weight or self.elastic):
            self._stale.discard(index)
        self.counters.exchanges = loop.exchanges
        if self.inner_state == "reset":
            inner_state.reset(self.optimizers, loop.fragments[index].params)
        elif self.inner_state == "average":
            moments = inner_state.averageable(self.optimizers, loop.fragments[index].params)
            self.run_job(lambda: inner_state.average(moments, loop.wire), f"averaging moments of fragment {index}")
        if index == len(loop.fragments) - 1:
            self._pace.mark(self.counters.steps)

    def _arrive(self) -> None:
        """Wait until no exchange is on its way."""
        for promise in self._pending.values():
            with self.counters.waiting():
                promise.future.wait()
            self.check_jobs(self._executors[-1])

    def telemetry(self) -> dict[str, float | Tensor]:  # noqa: D102 - inherited
        return super().telemetry() | (self._loop.telemetry() if self._loop is not None else {})

    # ---- consensus and state -----------------------------------------------------------------------------------------

    def consensus(self) -> dict[str, Tensor] | None:
        """The anchor and the buffers merged at the last exchange; while warming up, what every rank holds.

        Waits for an exchange under way, after which the anchor has moved already, if not the replicas.
        """
        if self._loop is None or self._step <= 0:
            return None
        self._arrive()
        return self._loop.consensus()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Let exchanges under way arrive, then save as the base does; what has arrived is applied when it is due."""
        if self._watcher is not None and self._watcher.failure is None:
            self._arrive()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def mode_state(self) -> ModeState:
        """Anchor, outer optimiser, merged buffers, exchanges that have arrived and are not applied yet, clocks."""
        if self._loop is None:
            return ModeState()
        numbers: dict[str, Any] = {**self._loop.numbers(), **self.schedule.state_dict()}
        numbers["step"], numbers["stale"] = self._step, " ".join(map(str, sorted(self._stale)))
        numbers["timing"], numbers["outer"] = self._timing, plain_repr(self._outer_factory())
        return ModeState(numbers, self._loop.tensors())

    def load_mode_state(self, state: ModeState, *, same: bool) -> Sequence[str]:
        """Take it over; with other ranks or options replicas start from the anchor, and their clocks afresh."""
        loop = self._loop
        if loop is None or "anchor" not in state.replicated:
            return state.kinds
        numbers: dict[str, Any] = dict(state.numbers)
        outer = numbers.get("outer") == plain_repr(self._outer_factory())
        lost = [] if outer else ["the outer optimiser, which is another one now"]
        if same and numbers.get("timing") == self._timing:
            loop.load(numbers, state.replicated, outer=outer)
            self.schedule.load_state_dict(numbers)
            self._stale = {int(i) for i in str(numbers["stale"]).split()}
            for index in loop.in_flight:
                self._pending[index] = promise = Promise(torch.futures.Future(), torch.empty(0))
                promise.complete()
            self.counters.exchanges = loop.exchanges
            self._begun = True
            self._pace.mark(self.counters.steps)
            return lost
        if int(numbers["step"]) <= 0:  # saved while warming up: all that counts is in the parameters
            loop.capture()
            return lost
        numbers = {k: v for k, v in numbers.items() if not k.startswith(("in_flight", "learned", "counted"))}
        loop.load(numbers, state.replicated, outer=outer)
        for fragment in loop.fragments:
            fragment.merge(0.0)
        loop.buffers.write(loop.merged_buffers)
        self.counters.exchanges = loop.exchanges
        if self._step <= 0:  # a warm-up of averaged gradients keeps replicas equal only if their optimisers are
            self._average_moments([p for f in loop.fragments for p in f.params], loop.wire)
        return [*lost, "steps of each replica since its last exchange", "the clocks of exchanges"]

    @property
    def _timing(self) -> str:
        """What an exchange under way depends on."""
        parts = (self.period, self.fragments, self.overlap_steps, self.local_weight, self.warmup_steps, self.elastic)
        return plain_repr(parts)

    def _close(self) -> None:
        super()._close()
        self._loop = None
        self._pending = {}
