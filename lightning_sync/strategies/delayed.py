"""Delayed: every step applies the gradients of the step before, which travelled while it ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_sync.checkpoint import ModeState
from lightning_sync.checks import check_integer
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors.resolve import is_exact, to_route
from lightning_sync.ddp_hook import param_specs
from lightning_sync.delay import GradientDelay
from lightning_sync.marks import GradientMarks
from lightning_sync.periodic.buffers import BufferMerge, BufferPolicy
from lightning_sync.precision import loss_scale_of
from lightning_sync.reducer import Reducer
from lightning_sync.strategies.batchnorm import ReplicaBatchNorm
from lightning_sync.strategies.unwrapped import UnwrappedStrategy, make_buckets


class DelayedStrategy(UnwrappedStrategy):
    r"""Reduce the gradients of step t while step t+1 runs, and apply them there.

    Step t of every rank applies :math:`g_{t-d}`, the mean of all ranks' gradients d steps ago; the first d steps apply
    nothing, and make no optimiser step. So the network has a whole step to finish, and parameters stay equal on all
    ranks, at the price of gradients that are d steps old: lower the learning rate if training becomes unstable. What
    is under way when training ends is dropped: it is d of all its gradients.

    Buffers stay each rank's own in training; validation and checkpoints see them merged, as of the last reduction.
    Memory on top of a plain run: one gradient per step of delay, and what the compressor keeps.

    Args:
        delay: d, at least 1. More hides a slower network and makes gradients older.
        compensation: lambda >= 0 of delay compensation, see `GradientDelay`. Defined for SGD, and refused for other
            optimisers; keeps a copy of the parameters per step of delay.
        buffers: ``"average"`` (counts: maximum) or ``"rank0"``.
        **kwargs: See `SyncStrategy`. Of DDP's options only ``bucket_cap_mb`` and ``find_unused_parameters``.

    Raises:
        ValueError: for a wrong value, or `compensation` with an optimiser that is not SGD.
    """

    mode = "delayed"
    lock_step: ClassVar[bool] = True
    equal_buffers: ClassVar[bool] = False

    def __init__(
        self,
        *args: Any,
        delay: int = 1,
        compensation: float = 0.0,
        buffers: BufferPolicy = "average",
        **kwargs: Any,
    ) -> None:
        if "replica" in kwargs:
            raise ValueError(
                f"DelayedStrategy(replica={kwargs['replica']!r}): all ranks hold one copy of the trajectory; leave it "
                "out. To reduce inside nodes first, use two_level=True."
            )
        super().__init__(*args, replica="rank", **kwargs)
        check_integer("DelayedStrategy", 1, delay=delay)
        if isinstance(compensation, bool) or not isinstance(compensation, (int, float)) or not compensation >= 0:
            raise ValueError(f"DelayedStrategy(compensation={compensation!r}): expected a number of at least 0.")
        if buffers not in ("average", "rank0"):
            raise ValueError(f"DelayedStrategy(buffers={buffers!r}): expected 'average' or 'rank0'.")
        self.delay = delay
        self.compensation = float(compensation)
        self.buffers: BufferPolicy = buffers
        self._late: GradientDelay | None = None
        self._slot = 0
        self._applied = True

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _register_ddp_hooks(self) -> None:
        """Make the reducer over all ranks."""
        module = self.model
        assert module is not None
        wires = self._make_wires(self.two_level)
        assert self._executor is not None
        named = param_specs(module)
        route = to_route(self.effective_compressor, error_feedback=self.error_feedback)
        self._replicas = [list(range(self.world_size))]
        self._reducer = Reducer([spec for spec, _ in named], route, wires, self.aggregator, self.seed)
        self._marks = GradientMarks((spec.name, p) for spec, p in named)
        on_cpu = self.root_device.type == "cpu"
        non_finite = self._alarms.hand_over()
        if non_finite is None and not is_exact(self.effective_compressor):
            non_finite = "raise"
        self._late = GradientDelay(
            make_buckets([(s.name, p) for s, p in named], self._ddp_kwargs.get("bucket_cap_mb", 25)),
            self._reducer,
            self._executor,
            BufferMerge(module, self.buffers),
            delay=self.delay,
            compensation=self.compensation,
            loss_scale=loss_scale_of(self.precision_plugin),
            non_finite=non_finite,
            ask_which=on_cpu or bool(self._ddp_kwargs.get("find_unused_parameters", False)),
            local_clip_norm=self.local_clip_norm,
        )

    def batchnorm(self, topology: Topology) -> ReplicaBatchNorm:
        """Refuse SyncBatchNorm: its collectives would run beside reductions under way.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "sync_batchnorm=True does not go with strategy='delayed': ranks are not to wait for each other in a step, "
            "and two groups would be busy at once. Leave it out (buffers are merged along the way), or use 'strict'."
        )

    def setup_optimizers(self, trainer: Trainer) -> None:
        """As Lightning's; compensation needs SGD."""
        super().setup_optimizers(trainer)
        others = sorted({type(o).__name__ for o in self.optimizers if not isinstance(o, torch.optim.SGD)})
        if self.compensation and others:
            raise ValueError(
                f"DelayedStrategy(compensation={self.compensation}) is defined for SGD, but the model uses "
                f"{', '.join(others)}, which rescales gradients. Leave compensation at 0."
            )

    # ---- training ----------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:  # noqa: D102 - inherited
        super().begin_batch()
        self._slot = 0

    def after_backward(self) -> None:
        """Send these gradients off and put older ones in their place, if this was the last backward of the window."""
        if self._blocked or self._late is None:
            return
        assert self._marks is not None
        own = self._weighing.close()
        self._applied = self._late.exchange(
            self._marks.take(), self.counters.steps, self._slot, own if self.weighs else None
        )
        self._slot += 1

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, but nothing is done with gradients that are not there yet."""
        module = self.lightning_module
        assert module is not None
        ready = self._late is None or (self._late.ready() if module.automatic_optimization else self._applied)
        if ready:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._attempted = True
        return closure()

    def finish_training(self) -> None:
        """Let what is under way arrive, and give all ranks the same buffers."""
        if self._late is not None:
            self._late.arrive()
            self._late.buffers.write(self._late.merged_buffers)

    def telemetry(self) -> dict[str, float | Tensor]:  # noqa: D102 - inherited
        return {**super().telemetry(), "staleness": float(self.delay)}

    # ---- consensus and state -----------------------------------------------------------------------------------------

    def consensus(self) -> dict[str, Tensor] | None:
        """The merged buffers; parameters are equal on all ranks."""
        if self._late is None:
            return None
        self._late.arrive()
        return self._late.merged_buffers or None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Let what is under way arrive, then save as the base does."""
        if self._late is not None and self._watcher is not None and self._watcher.failure is None:
            self._late.arrive()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def mode_state(self) -> ModeState:
        """Gradients that have arrived and are not applied yet, and merged buffers."""
        return ModeState() if self._late is None else ModeState({}, self._late.tensors())

    def load_mode_state(self, state: ModeState, *, same: bool) -> Sequence[str]:
        """Take it over: gradients under way are means over all ranks, so any number of ranks can apply them."""
        if self._late is None:
            return state.kinds
        self._late.load(state.replicated)
        return []

    def _close(self) -> None:
        super()._close()
        self._late = None
