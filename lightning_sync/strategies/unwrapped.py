"""The un-wrapped base: no DDP around the model, gradients averaged inside a replica, nothing sent beyond it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sync.aggregators import Mean, WeightedMean
from lightning_sync.checkpoint import ReplicaState
from lightning_sync.clipping import clip_
from lightning_sync.comm.flat_broadcast import broadcast_tensors
from lightning_sync.comm.groups import Wires, discover_topology, make_group_wire
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import Exact, as_route
from lightning_sync.ddp_hook import param_specs
from lightning_sync.marks import GradientMarks
from lightning_sync.precision import loss_scale_of
from lightning_sync.reducer import Reducer
from lightning_sync.replica import Replica, resolve_replica
from lightning_sync.state import canonical_name
from lightning_sync.strategies.base import SyncStrategy
from lightning_sync.strategies.batchnorm import ReplicaBatchNorm
from lightning_sync.strategies.boundary import StepBoundary
from lightning_sync.strategies.consensus import ConsensusView, refuse_averaging_callbacks
from lightning_sync.strategies.restore import replica_optimizers
from lightning_sync.weights import Contribution, Weight, all_zero


class UnwrappedStrategy(SyncStrategy):
    """Base of all modes in which replicas do not meet in every step.

    A replica is the set of ranks that holds one copy of the trajectory: inside it gradients are averaged, exactly,
    after the last backward of every step. Between replicas nothing is sent; that is what subclasses add. Parameters and
    buffers start equal on all ranks, as rank 0 has them; buffers follow the replica's first rank at every step, as in
    DDP.

    Args:
        replica: ``"rank"``: every rank on its own. ``"node"``: the ranks of a node. A number: that many consecutive
            ranks. ``"auto"``: ``"node"`` when there are several nodes, else ``"rank"``.
        **kwargs: See `SyncStrategy`. Of DDP's options ``bucket_cap_mb`` (25 by default) and ``find_unused_parameters``
            (False: on CUDA every rank of a replica must produce the same gradients) keep their meaning; those which
            belong to DDP's wrapper have none here and are refused.
    """

    mode = "unwrapped"
    equal_buffers: ClassVar[bool] = True

    def __init__(self, *args: Any, replica: Replica = "auto", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        resolve_replica(replica)
        foreign = sorted(set(self._ddp_kwargs) - {"bucket_cap_mb", "find_unused_parameters"})
        if foreign or self._ddp_comm_hook is not None:
            raise ValueError(
                f"{type(self).__name__}: {', '.join(foreign) or 'ddp_comm_hook'} belongs to DDP, which this strategy "
                "does not use. Leave it out, or use strategy='strict'."
            )
        self.replica: Replica = replica
        self._blocked = False
        self._in_batch = False
        self._attempted = False
        self._boundary: StepBoundary | None = None
        self._inner: Reducer | None = None
        self._marks: GradientMarks | None = None
        self._buckets: list[list[tuple[str, nn.Parameter]]] = []
        self._replicas: list[list[int]] = []
        self._view: ConsensusView | None = None
        self._batchnorm: ReplicaBatchNorm | None = None
        self._idle = False
        self._trained: set[int] = set()

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """As the base; SyncBatchNorm layers stay inside their replica."""
        if self._layer_sync is not None and trainer.training:
            self._layer_sync = self._batchnorm = self.batchnorm(discover_topology(self.node_rank, self.root_device))
        super().setup(trainer)

    def batchnorm(self, topology: Topology) -> ReplicaBatchNorm:
        """What ``Trainer(sync_batchnorm=True)`` means here (collective)."""
        return ReplicaBatchNorm(resolve_replica(self.replica, topology), self.global_rank)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        """Leave the model as it is; give every rank rank 0's parameters and buffers."""
        broadcast_tensors([*model.parameters(), *model.buffers()], source=0)
        return model

    def _open(self, trainer: Trainer) -> None:
        if not self.lock_step:
            refuse_averaging_callbacks(trainer, self.mode)
        super()._open(trainer)
        self._trained = {id(p) for p in trainer.lightning_module.parameters() if p.requires_grad}
        self._view = ConsensusView(trainer.lightning_module)
        self._in_batch = self._attempted = False
        self._boundary = StepBoundary(self._end_batch, self._leave_batch, self.finish_training)
        trainer.callbacks.insert(0, self._boundary)  # type: ignore[attr-defined]

    def _register_ddp_hooks(self) -> None:
        """Make the replica's group and reducer."""
        module = self.model
        assert module is not None
        topology = discover_topology(self.node_rank, self.root_device)
        self._replicas = resolve_replica(self.replica, topology)
        wire = make_group_wire(self._replicas, topology, self.counters, self._make_executor().wait, self.group_timeout)
        named = param_specs(module)
        mean = WeightedMean() if self._weighing.asked else Mean()
        self._inner = Reducer([spec for spec, _ in named], as_route(Exact()), Wires(wire), mean, self.seed)
        self._reducer = self._inner
        self._marks = GradientMarks((spec.name, p) for spec, p in named)
        self._buckets = make_buckets([(s.name, p) for s, p in named], self._ddp_kwargs.get("bucket_cap_mb", 25))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def leaders(self) -> tuple[int, ...]:  # noqa: D102 - inherited
        first = {rank: ranks[0] for ranks in self._replicas for rank in ranks}
        return tuple(first[rank] for rank in range(self.world_size))

    def replica_state(self) -> ReplicaState | None:  # noqa: D102 - inherited
        module = self.lightning_module
        assert module is not None
        if len(self._replicas) < 2 or self.leaders()[self.global_rank] != self.global_rank:
            return None
        parameters = {canonical_name(name): p.detach() for name, p in module.named_parameters()}
        return ReplicaState(parameters, replica_optimizers(self.optimizers, module))

    # ---- the consensus -----------------------------------------------------------------------------------------------

    def consensus(self) -> dict[str, Tensor] | None:
        """Parameters and buffers that all ranks agree on, by name; `None` where that is what every rank holds."""
        return None

    def on_validation_start(self) -> None:
        """Inside `fit`, validate what all ranks agree on."""
        super().on_validation_start()
        values = self.consensus()
        if self._view is not None and values is not None:
            self._view.show(values)

    def on_validation_end(self) -> None:
        """Go on with this replica's own parameters, bit for bit as they were."""
        if self._view is not None:
            self._view.hide()
        super().on_validation_end()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """As the base; what is saved beside the checkpoint is this replica's own, also at the end of a validation."""
        values = self.consensus() if self._view is not None and self._view.shown else None
        if self._view is None or values is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self._view.hide()
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        finally:
            self._view.show(values)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's, with what all ranks agree on: that is what an ordinary checkpoint holds."""
        state = super().lightning_module_state_dict()
        values = self.consensus()
        return state if self._view is None or values is None else self._view.replace(state, values)

    # ---- users' own collectives --------------------------------------------------------------------------------------

    def why_alone(self) -> str | None:  # noqa: D102 - inherited
        if not self.lock_step and self._in_batch and self.world_size > 1:
            return (
                f"strategy={self.mode!r} is there to avoid waiting for other ranks in every step; ranks may even be at "
                "different steps"
            )
        return super().why_alone()

    # ---- training ----------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """While this is active, backward accumulates and nothing is averaged."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def begin_batch(self) -> None:  # noqa: D102 - inherited
        self._in_batch = True
        self._attempted = False

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; notes that this batch holds a step, however many optimisers take part in it.

        A replica none of whose ranks has data takes no step: an optimiser would act on gradients of zero, too.
        """
        self._attempted = True
        if not self._supply.spare:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        result = closure()
        return result if self._idle else super().optimizer_step(optimizer, lambda: result, *args, **kwargs)

    def _leave_batch(self) -> None:
        self._in_batch = False

    def _end_batch(self) -> None:
        self._in_batch = False
        self._refuse_unfrozen()
        if self._attempted:
            self._attempted = False
            self.counters.steps += 1
            self.after_step()

    def _refuse_unfrozen(self) -> None:
        """Raise if a parameter takes gradients that did not when groups and anchors were made."""
        module = self.lightning_module
        assert module is not None
        for name, p in module.named_parameters():
            if p.requires_grad and id(p) not in self._trained:
                raise RuntimeError(
                    f"Parameter {name!r} was unfrozen during fit, but strategy={self.mode!r} sets up what it exchanges "
                    "when fit begins. Let it require gradients from the start (with a learning rate of 0 at first), "
                    "or call fit again after unfreezing."
                )

    def after_step(self) -> None:
        """Called after every attempted step, once all optimisers and schedulers have stepped."""

    def finish_training(self) -> None:
        """Called at the end of training, before anybody saves or tests the result."""

    def gradient_reducer(self) -> Reducer:
        """What averages the gradients of this step: over the replica."""
        assert self._inner is not None
        return self._inner

    def after_backward(self) -> None:
        """Average the gradients, if this was the last backward of the window."""
        if self._blocked or self._inner is None:
            return
        assert self._marks is not None
        reducer, own = self.gradient_reducer(), self._weighing.close()
        if reducer.wires.world.size == 1:
            self._marks.clear()
            self._divide(own)
            self._clip(1.0)
        else:
            reducer.step = self.counters.steps
            self.run_job(lambda: self._average(reducer, own), f"averaging gradients at step {self.counters.steps}")
        self.learned(own)
        self._alarms.check_gradients(self.counters.steps)

    def run_job(self, job: Callable[[], None], where: str) -> None:
        """Run collectives on the communication thread, and wait for them."""
        assert self._executor is not None
        promise = self._executor.promise(torch.empty(0, device=self.root_device))
        self._executor.submit(job, [promise], where)
        with self.counters.waiting():
            promise.future.wait()
        self.check_jobs(self._executor)

    def learned(self, own: Contribution) -> None:
        """Called with what this rank has brought to a step's gradients."""

    def _divide(self, own: Contribution) -> None:
        """Make of the sum over this rank's window, the only one of its replica, a mean."""
        if not self.weighs:
            return
        if isinstance(own.weight, float):
            self._check_weight(own.weight, f"rank {self.global_rank}")
            if own.weight == 0 or own.unit == own.weight or not self._weighing.asked:
                return
        assert self.model is not None
        held = [p.grad for p in self.model.parameters() if p.grad is not None]
        if held:
            torch._foreach_mul_(held, own.unit / own.weight)

    def _check_weight(self, total: Weight, ranks: str) -> None:
        """Note whether the replica has nothing to learn from; that is an error where it has data."""
        if isinstance(total, float) or self._supply.spare:
            self._idle = float(total) == 0
            if self._idle and not self._supply.spare:
                raise all_zero(self.counters.steps, ranks)

    def _clip(self, unit: Weight) -> None:
        """Clip this rank's own gradient, if asked for; `unit` times it is its mean."""
        if self.local_clip_norm is not None and self.model is not None:
            scale = loss_scale_of(self.precision_plugin)
            held = [p.grad for p in self.model.parameters() if p.grad is not None]
            clip_(held, self.local_clip_norm, unit if scale is None else unit / scale())

    def _average(self, reducer: Reducer, own: Contribution) -> None:
        assert self._marks is not None
        source = 0
        if self.weighs:
            self._check_weight(reducer.weigh(own), f"the replica of rank {self.global_rank}")
        self._clip(own.ratio if self.weighs else 1.0)
        if self._supply.joining:
            # Which of these ranks had data is known to nobody yet. On a GPU this stops the host.
            wire = reducer.wires.world
            here = torch.tensor([wire.size - wire.rank if own.weight else 0], device=reducer.params[0].device)
            source = (wire.size - int(wire.maximum(here))) % wire.size
        names = [name for bucket in self._buckets for name, _ in bucket]
        used = self._used(names, reducer)
        for bucket in self._buckets:
            members = [(name, p) for name, p in bucket if name in used]
            if members:
                reducer.reduce([name for name, _ in members], [_gradient(p) for _, p in members])
        self._marks.clear()
        module = self.lightning_module
        assert module is not None
        broadcast_tensors(list(module.buffers()), source, wire=reducer.wires.world)

    def _used(self, names: Sequence[str], reducer: Reducer) -> set[str]:
        """The parameters that any rank has used since the marks were cleared.

        Ranks that disagree about which gradients exist would add up different parameters. Asking costs a small
        all-reduce, on CUDA also a stop of the host, so there it is asked for.
        """
        assert self._marks is not None
        if self._ddp_kwargs.get("find_unused_parameters", False) or self.root_device.type == "cpu":
            return {n for n, yes in zip(names, self._marks.used_anywhere(names, reducer), strict=True) if yes}
        return {name for name in names if name in self._marks}

    def _close(self) -> None:
        trainer = self.attached_trainer()
        if self._boundary is not None and trainer is not None and self._boundary in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._boundary)  # type: ignore[attr-defined]
        self._boundary = None
        if self._marks is not None:
            self._marks.close()
            self._marks = None
        if self._batchnorm is not None and (self._watcher is None or self._watcher.failure is None):
            self._batchnorm.close()  # after a failure a collective may be blocked in it
        self._batchnorm = None
        super()._close()  # while the reducers are known: it gives their groups back
        self._inner = None
        self._view = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient; zeros where another rank used the parameter and this one did not."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def make_buckets(named: list[tuple[str, nn.Parameter]], cap_mb: float) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters of one dtype in groups of about `cap_mb` MiB, last ones first, as backward produces them."""
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    size: dict[torch.dtype, float] = {}
    open_bucket: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, p in reversed(named):
        if p.dtype not in open_bucket or size[p.dtype] + p.nbytes > cap_mb * 2**20:
            open_bucket[p.dtype], size[p.dtype] = [], 0.0
            buckets.append(open_bucket[p.dtype])
        open_bucket[p.dtype].append((name, p))
        size[p.dtype] += p.nbytes
    return buckets
