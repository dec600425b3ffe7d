"""Strict: all replicas meet in every step (bulk-synchronous), on DDP's reducer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sync import _compat
from lightning_sync.aggregators import Mean
from lightning_sync.comm.flat_broadcast import broadcast_tensors
from lightning_sync.comm.groups import discover_topology
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.resolve import is_exact, to_route
from lightning_sync.ddp_hook import CommHook, param_specs
from lightning_sync.precision import loss_scale_of
from lightning_sync.reducer import Reducer
from lightning_sync.strategies import buckets
from lightning_sync.strategies.base import SyncStrategy
from lightning_sync.strategies.spare import forward_of_nothing, parameters_to_touch


class StrictStrategy(SyncStrategy):
    """Average gradients over all ranks in every step, compressed if asked.

    Without a compressor this is DDP: the stock all-reduce, the same bits, no Python in its path. With one, DDP's
    reducer hands each bucket to a communication thread while backward goes on.

    See `SyncStrategy` for all options.
    """

    mode = "strict"
    lock_step: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hook: CommHook | None = None
        self._topology: Topology | None = None
        self._gradient_bytes = 0
        self._stepped = False
        self._correction = 1.0
        if self._ddp_comm_hook is not None and kwargs.get("non_finite") is not None:
            raise ValueError(
                f"StrictStrategy: non_finite={kwargs['non_finite']!r} does not go with ddp_comm_hook, which decides "
                "what is sent and when; look for inf and NaN in the hook."
            )
        if self._ddp_comm_hook is not None and self.local_clip_norm is not None:
            raise ValueError(
                f"StrictStrategy: local_clip_norm={self.local_clip_norm!r} does not go with ddp_comm_hook, which sees "
                "one bucket at a time. Leave out one of them."
            )
        if self._ddp_comm_hook is not None and not is_exact(self.compressor):
            raise ValueError(
                f"StrictStrategy: ddp_comm_hook and compressor={self.compressor!r} both decide what is sent; pass one."
            )
        if self._ddp_comm_hook is not None and self.aggregator != Mean():
            raise ValueError(
                f"StrictStrategy: ddp_comm_hook and aggregator={self.aggregator!r} both decide how gradients become "
                "one; leave out one of them."
            )

    @property
    def is_stock(self) -> bool:
        """Whether this is DDP's own all-reduce: no compressor, the mean, nothing clipped, no two levels asked for."""
        plain = is_exact(self.effective_compressor) and self.aggregator == Mean()
        return plain and not self.two_level and self.local_clip_norm is None

    def _register_ddp_hooks(self) -> None:
        """Register the reduction on any device (Lightning registers hooks on CUDA only, and says nothing elsewhere)."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        buckets.pin(model, self._keeper.order_to_pin())
        _compat.take_buffers_from(model, self._authority)
        if self._ddp_comm_hook is not None:
            hook = self._ddp_comm_wrapper(self._ddp_comm_hook) if self._ddp_comm_wrapper else self._ddp_comm_hook
            model.register_comm_hook(self._ddp_comm_state, hook)
        elif self.is_stock:
            self._topology = discover_topology(self.node_rank, self.root_device)
            self._gradient_bytes = sum(p.nbytes for p in model.module.parameters() if p.requires_grad)
            self.counters.wait_seconds = None
        else:
            wires = self._make_wires(self.two_level)
            route = to_route(self.effective_compressor, error_feedback=self.error_feedback)
            specs = [spec for spec, _ in param_specs(model.module)]
            self._reducer = Reducer(specs, route, wires, self.aggregator, self.seed)
            assert self._executor is not None
            scale = loss_scale_of(self.precision_plugin)
            non_finite = self._alarms.hand_over()
            self._hook = CommHook(
                model, self._reducer, self._executor, self.counters, scale, non_finite, self.local_clip_norm
            )

    def bucket_order(self, *, collective: bool = True) -> Sequence[nn.Parameter]:  # noqa: D102 - inherited
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        return buckets.bucket_order(model, collective=collective)

    def begin_batch(self) -> None:
        """Several backwards of one batch (manual optimisation) are one step."""
        self._stepped = False
        if self._hook is not None:
            self._hook.begin_batch()

    def before_backward(self) -> None:
        """Agree on what each rank counts for, if a reduction follows."""
        if getattr(self.model, "require_backward_grad_sync", False):
            own, counts = self._weighing.close(), self._supply.attended()
            if self._hook is not None and self.weighs:
                self._hook.weigh(own, None if self._weighing.asked else counts)
            elif counts:
                self._correction = max(counts) * self.world_size / sum(counts)

    def after_backward(self) -> None:
        """Raise what the communication thread ran into; count what torch sent in the stock path."""
        if self._hook is not None:
            self._hook.check()
            return
        self._correct()
        if self._topology is not None and getattr(self.model, "require_backward_grad_sync", False):
            sent = self._topology.all_reduce(self._gradient_bytes)
            self.counters.steps += not self._stepped
            self._stepped = True
            self.counters.count(self._gradient_bytes, sent, self._topology.ring_messages)
            self.counters.count_dense(sent)
            self._alarms.check_gradients(self.counters.steps - 1)

    def _correct(self) -> None:
        """Make of DDP's mean over all ranks the mean over micro-batches that are data."""
        correction, self._correction = self._correction, 1.0
        if correction != 1:
            assert self.model is not None
            torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], correction)

    def spare_step(self) -> Tensor:
        """DDP's forward, which sends buffers and awaits gradients, around nothing."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        return forward_of_nothing(model, model.module, parameters_to_touch(model))

    def _authority(self) -> int:
        """Whose buffers everybody takes over before a forward: rank 0's, as in DDP, as long as it has data."""
        source = self._supply.authority
        self._supply.pass_authority()
        return source

    # ---- validation --------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Inside `fit`, give all ranks the same buffers, once instead of in every batch, as DDP would."""
        super().on_validation_start()
        model = self.model
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            broadcast_tensors(model.modules_buffers, self._supply.authority)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, around DDP: ranks may have different numbers of validation batches."""
        if not isinstance(self.model, DistributedDataParallel) or self.lightning_module is None:
            return super().validation_step(*args, **kwargs)
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def predicted_bytes(self, step: int | None = None) -> Bytes | None:  # noqa: D102 - inherited
        if self._topology is not None:
            return self._topology.all_reduce(self._gradient_bytes)
        return super().predicted_bytes(step)

    def _close(self) -> None:
        if self._hook is not None:
            self._hook.close()
            self._hook = None
        self._topology = None
        super()._close()
