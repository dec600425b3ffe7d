"""Asynchronous: replicas never meet in a step; each exchanges with the owners of the parameters on its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_sync import _compat
from lightning_sync.asynchronous.codec import codec_for
from lightning_sync.asynchronous.engine import Engine, Terms, as_secret, pick_weight
from lightning_sync.asynchronous.rules import RULES, Rule
from lightning_sync.checkpoint import ModeState
from lightning_sync.checks import plain_repr
from lightning_sync.comm.board import Board
from lightning_sync.comm.flat_broadcast import broadcast_tensors
from lightning_sync.comm.groups import Wires, discover_topology, make_wires
from lightning_sync.comm.mail import new_secret, own_address
from lightning_sync.comm.progress import SLOWER_REPLICAS
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.ddp_hook import param_specs
from lightning_sync.periodic.buffers import BufferMerge, BufferPolicy
from lightning_sync.periodic.local_updates import LocalUpdates
from lightning_sync.periodic.outer import OuterFactory, build_outer
from lightning_sync.reducer import Reducer
from lightning_sync.strategies.async_options import check_options
from lightning_sync.strategies.batchnorm import ReplicaBatchNorm
from lightning_sync.strategies.owned_steps import check_gradients, gradients_of, unstepped
from lightning_sync.strategies.remarks import warn_if_short
from lightning_sync.strategies.warmed import WarmedStrategy
from lightning_sync.weights import Contribution


class AsyncStrategy(WarmedStrategy):
    r"""Every rank trains at its own speed and exchanges its progress with the owners of the parameters.

    The trained parameters are cut into one float32 shard per rank, kept in its owner's host memory. Every `sync_every`
    steps a replica sends each owner its part of the *delta* d, what it has learned since it last did, and gets the
    owner's values v back, while it trains on:

    .. math:: v \leftarrow v - w\, d \quad\text{(or as the rule says)}, \qquad x \leftarrow v + (x - x_{sent})

    Nobody waits for anybody, unless `max_staleness` bounds what is read. A contribution is applied exactly once.
    Validation, checkpoints and the end of `fit` are *quiet points*: replicas send what they have left, wait for each
    other and go on from the same values, with buffers merged. Each replica is one rank. Every rank makes the steps that
    its own limits say (`max_steps` and epochs count each rank's own), so at quiet points fast ranks wait for slow ones.

    Args:
        sync_every: Steps between two exchanges (1 by default). More sends less and makes contributions larger and
            staler. If one is due while another is under way, its progress becomes part of the next; the achieved
            period is reported. With a bound, it waits instead.
        max_staleness: s of stale-synchronous parallel: a replica at clock c (exchanges finished) goes on only with
            parameters that contain every replica's updates up to c - s - 1. Smaller waits more. `None`: no bound.
            It cannot help where one rank is slower for good: all wait for it in the long run.
        push: What is sent: ``"delta"``, or ``"gradient"``, which owners apply with the module's own optimiser, if that
            acts element by element (SGD, Adam, ...). Every gradient that arrives is one step of it, so that N replicas
            make N steps in the time of one; lower the learning rate. A parameter that a step did not use gets a
            gradient of zero. One optimiser, no loss scaler.
        rule: What a contribution does: a name (``"add"``, ``"inverse_staleness"``, ``"delay_compensated"``,
            ``"delayed_nesterov"``, ``"quorum"``) or a `Rule`.
        outer_optimizer: What applies the rule's change to a shard, with the change in place of a gradient: `Nesterov`,
            or a function from a list of tensors to a torch optimiser. `None`: it is subtracted. Momentum at every
            arrival pushes stale contributions on; ``"delayed_nesterov"`` and ``"quorum"`` were made against that.
        weight: w. `None`: 1 for gradients, and 1 / number of replicas for deltas, with which N replicas that learn the
            same move the values by one replica's progress. 1 for deltas: all progress is added up, as in classic
            parameter servers; learns faster and diverges sooner, the more so with momentum and Adam, whose step sizes
            know nothing of the other replicas.
        blocking: Whether a step waits for the exchange before it. False hides the network and reads older values.
        warmup_steps: Steps at the beginning in which gradients are averaged over all ranks, exactly, as in strict: all
            wait for the slowest one, nothing is stale, and replicas leave it with the same bits. Only for deltas, since
            owners' optimisers would begin without the moments of these steps.
        align_every: K. A quiet point after every K exchanges that are due, that is every K * `sync_every` steps after
            the warm-up, which ranks must make equally many of. Smaller keeps replicas closer together and waits more:
            all wait for the slowest one there. `None`: only where there is another reason for one.
        local_updates: ``"dynamic"``: `sync_every` is the period of the fastest replica, and others' are shorter in
            proportion to their measured speed (at least 1), see `LocalUpdates`: contributions come at about the same
            times, and a slow replica's are less stale. ``"fixed"``: all make `sync_every` steps.
        buffers: At quiet points: ``"average"`` (counts: maximum) or ``"rank0"``.
        **kwargs: See `UnwrappedStrategy`; `replica` is ``"rank"``.

    Memory on top of a plain run: 4 bytes per parameter divided by the number of ranks for the shard, and 20 per
    parameter in host memory (mark, delta, values fetched, a buffer, the shard's answers); 12 more with a compressor.

    Raises:
        ValueError, TypeError: for a wrong value or combination, at construction or setup.
    """

    mode = "asynchronous"

    def __init__(
        self,
        *args: Any,
        sync_every: int = 1,
        max_staleness: int | None = None,
        push: Literal["delta", "gradient"] = "delta",
        rule: Rule | str = "add",
        weight: float | None = None,
        outer_optimizer: OuterFactory | None = None,
        blocking: bool = False,
        warmup_steps: int = 0,
        align_every: int | None = None,
        local_updates: Literal["fixed", "dynamic"] = "fixed",
        buffers: BufferPolicy = "average",
        **kwargs: Any,
    ) -> None:
        owner = type(self).__name__
        if kwargs.pop("replica", "rank") != "rank":
            raise ValueError(f"{owner}: each rank is a replica of its own; leave `replica` out, or use HybridStrategy.")
        super().__init__(*args, replica="rank", warmup_steps=warmup_steps, **kwargs)
        self.rule = RULES.build(rule)
        check_options(
            owner, self.rule, sync_every=sync_every, max_staleness=max_staleness, push=push, weight=weight,
            outer_optimizer=outer_optimizer, blocking=blocking, buffers=buffers, warmup_steps=warmup_steps,
            align_every=align_every, local_updates=local_updates,
        )  # fmt: skip
        self.sync_every = sync_every
        self.max_staleness = max_staleness
        self.push = push
        self.weight = weight
        self.outer_optimizer = outer_optimizer
        self.blocking = blocking
        self.align_every = align_every
        self.local_updates = local_updates
        self.buffers: BufferPolicy = buffers
        self.engine: Engine | None = None
        self._wires: Wires | None = None
        self._merge: BufferMerge | None = None
        self._merged: dict[str, Tensor] = {}
        self._samples = 0.0
        self._local: LocalUpdates | None = None
        self._options: list[dict[str, Any]] = []
        self._report_at_end: dict[str, float] = {}

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def batchnorm(self, topology: Topology) -> ReplicaBatchNorm:
        """Refuse SyncBatchNorm, whose layers wait for all ranks in every forward.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"sync_batchnorm=True does not go with strategy={self.mode!r}: ranks are not to wait for each other in a "
            "step. Leave it out (running statistics are merged at quiet points), or use 'strict'."
        )

    def _register_ddp_hooks(self) -> None:
        """Make the shards, and tell all ranks where they are (collective)."""
        super()._register_ddp_hooks()
        module = self.model
        assert module is not None
        assert self._executor is not None
        topology = discover_topology(self.node_rank, self.root_device)
        self._wires = make_wires(topology, self.counters, self._executor.wait, False, self.group_timeout)
        self._merge = BufferMerge(module, self.buffers)
        self._prepare_warm_up(self._wires)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """As Lightning's, then make the shards, and tell all ranks where they are (collective).

        Raises:
            ValueError: for what does not go with ``push="gradient"``.
        """
        super().setup_optimizers(trainer)
        if self._wires is None:  # not in fit
            return
        assert self.model is not None
        assert self.cluster_environment is not None
        if self.push == "gradient":
            check_gradients(self.optimizers, getattr(self.precision_plugin, "scaler", None))
        secret = torch.zeros(40, dtype=torch.uint8, device=self.root_device)
        if self.global_rank == 0:
            secret.copy_(torch.frombuffer(bytearray(new_secret()), dtype=torch.uint8))
        dist.broadcast(secret, 0)
        named, outer = param_specs(self.model), self.outer_optimizer
        terms = Terms(
            self.sync_every,
            self.max_staleness,
            self.blocking,
            self.push,
            pick_weight(self.weight, self.world_size, self.push),
            self.rule.for_replicas(self.world_size),
        )
        self.engine = Engine(
            [spec for spec, _ in named],
            [p for _, p in named],
            terms,
            codec_for(self.effective_compressor),
            topology=self._wires.world.topology,
            counters=self.counters,
            secret=as_secret(secret),
            number=int(self.store_prefix.rsplit("/", 1)[-1], 16),
            address=own_address(self.cluster_environment.main_address),
            outer=None if outer is None else lambda values: build_outer(outer, [values]),
            inner=self.optimizers[0] if self.push == "gradient" else None,
            on_error=self._report,
            check=self._check_run,
            waiting=self._waiting,
        )
        board = Board(_compat.default_store(), f"{self.store_prefix}/boxes")
        board.put(str(self.global_rank), self.engine.card)
        dist.barrier()
        self.engine.connect(board.read_all([str(r) for r in range(self.world_size)]))
        self._merged, self._samples, self._local = {}, 0.0, None
        if self.local_updates == "dynamic":
            notes, waited = Board(_compat.default_store(), f"{self.store_prefix}/speed"), self.counters.waited
            self._local = LocalUpdates(notes, self.global_rank, self.world_size, self.sync_every, waited)

    def on_train_start(self) -> None:
        """Say so if the run is too short for this mode; begin to measure."""
        super().on_train_start()
        trainer = self.attached_trainer()
        if trainer is not None and self.warmup_steps:
            warn_if_short(trainer, self.sync_every, self.warmup_steps)
        if self._local is not None:
            self._local.begin(self.counters.steps)

    def _all_wires(self) -> list[Wires]:
        return [*super()._all_wires(), *([] if self._wires is None else [self._wires])]

    def _say_bytes(self, reducer: Reducer, per: str = "step") -> None:
        """Nothing: how much is sent depends on how fast ranks are."""

    def predicted_bytes(self, step: int | None = None) -> Bytes | None:
        """`None`: how much is sent depends on how fast ranks are."""
        return None

    # ---- training ----------------------------------------------------------------------------------------------------

    def learned(self, own: Contribution) -> None:
        """Note what the step's data counts for."""
        self._samples += float(own.weight)

    def after_step(self) -> None:
        """Exchange, if it is time; when the warm-up has ended, begin from what all ranks hold."""
        if self.engine is None:
            return
        samples, self._samples = self._samples, 0.0
        if self._step <= 0:
            if self._step == 0:
                self.engine.restart(self.counters.steps)
            return
        if self.push == "delta":
            self.engine.after_step(samples)
        else:
            assert self.model is not None
            self.engine.set_options(self._options)
            self.engine.after_step(samples, gradients_of([p for _, p in param_specs(self.model)]))
        self._pace(self.engine)
        # Counted in steps, which all ranks agree on, and not in exchanges, of which a busy rank puts some together:
        # so all come to this point and to validations and checkpoints in the same order.
        if self.align_every is not None and self._step % (self.align_every * self.sync_every) == 0:
            self.meet()

    def _pace(self, engine: Engine) -> None:
        """With an exchange, adapt the period to this rank's speed, if that is asked for."""
        if self._local is not None and self._supply.spare:  # no data, no time
            self._local.begin(self.counters.steps)
        elif self._local is not None and engine.replica.steps == 0:
            engine.every = self._local.exchanged(self.counters.steps)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; with ``push="gradient"`` all but the step itself, which is the owners'."""
        if self.push == "delta":
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._options = [dict(group) for group in optimizer.param_groups]  # before schedulers change them
        with unstepped(optimizer):
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def finish_training(self) -> None:
        """Send what is left, so that all replicas end with the same values."""
        self.meet()

    def meet(self) -> None:
        """Come to a quiet point (all ranks): every replica ends with the owners' values, and merged buffers."""
        engine = self.engine
        if engine is None or engine.met or self._step <= 0 or self._wires is None or self._merge is None:
            return
        engine.meet()
        merge, wire, own = self._merge, self._wires.world, self._merge.snapshot()

        def together() -> None:
            # Also: nobody leaves before all have read, since what a box has not sent yet goes with it.
            wire.maximum(torch.zeros(1, device=self.root_device))
            self._merged = merge.merge(own, wire)

        with self._waiting():
            self.run_job(together, f"merging buffers at step {self.counters.steps}")
        merge.write(self._merged)

    @contextmanager
    def _waiting(self) -> Generator[None, None, None]:
        assert self._watcher is not None
        with self.counters.waiting(), self._watcher.at(SLOWER_REPLICAS):
            yield

    def _check_run(self) -> None:
        if self._watcher is not None:
            self._watcher.check()

    @property
    def report(self) -> dict[str, float]:
        """What this rank has seen, now or, after `fit`, at its end; see `Engine.report`."""
        return self._report_at_end if self.engine is None else self.engine.report()

    def telemetry(self) -> dict[str, float | Tensor]:
        """As the base, with staleness and clock lead (means since `fit` began) and the achieved period."""
        if self.engine is None or not self.engine.exchanges:
            return super().telemetry()
        seen = self.engine.report()
        own = {"staleness": seen["staleness_mean"], "clock_lead": seen["clock_lead_mean"]}
        return super().telemetry() | own | {"period": seen["achieved_period"]}

    # ---- consensus and state -----------------------------------------------------------------------------------------

    def consensus(self) -> dict[str, Tensor] | None:
        """The owners' values and merged buffers, as of the quiet point after this step.

        `None` until the warm-up is over: that is what every rank holds.
        """
        if self.engine is None or self._step <= 0:
            return None
        self.meet()
        return {**self.engine.consensus(), **self._merged}

    def on_validation_start(self) -> None:
        """Come to a quiet point, then as the base."""
        trainer = self.attached_trainer()
        if self.engine is not None and trainer is not None and not trainer.sanity_checking:
            self.meet()
        if self._local is not None:
            self._local.pause()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """As the base; time spent in validation is not the time of steps."""
        super().on_validation_end()
        if self._local is not None:
            self._local.go_on()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Come to a quiet point, then save as the base does."""
        if self._watcher is not None and self._watcher.failure is None:
            self.meet()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._local is not None:
            self._local.begin(self.counters.steps)

    def mode_state(self) -> ModeState:
        """This rank's shard and clocks; all contributions are in it, since it is saved at quiet points."""
        if self.engine is None:
            return ModeState()
        numbers: dict[str, Any] = {"terms": self._terms, "warming_up": self._step < 0}
        if self._step < 0:  # nothing has come to the shards yet
            return ModeState(numbers)
        return ModeState({**self.engine.numbers(), **numbers}, {}, self.engine.tensors())

    def load_mode_state(self, state: ModeState, *, same: bool) -> Sequence[str]:
        """Take it over; with other ranks or rules shards start from the consensus."""
        if self.engine is None or not state.numbers:
            return state.kinds
        before = self.counters.state_dict()
        # While warming up, all that counts is in the parameters.
        lost = [] if state.numbers.get("warming_up") else ["clocks, and what the rule remembers"]
        if self._step < 0:
            if lost:  # a warm-up keeps equal what is equal
                assert self.model is not None
                assert self._wires is not None
                params = [p for _, p in param_specs(self.model)]
                broadcast_tensors(params, source=0)
                self._average_moments(params, self._wires.world)
        elif same and state.numbers.get("terms") == self._terms and state.local:
            self.engine.load(state.numbers, state.local)
            lost = []
        else:
            self.engine.restart(self.counters.steps)
        dist.barrier()  # so that all owners have counted
        self.counters.load_state_dict(before)  # reading the shards is part of set-up
        return lost

    @property
    def _terms(self) -> str:
        """What a shard's state depends on."""
        return plain_repr((self.push, self.rule, self.outer_optimizer))

    def _close(self) -> None:
        if self.engine is not None:
            self._report_at_end = self.engine.report()
            self.engine.close()
        super()._close()
        self.engine = self._wires = self._local = None
