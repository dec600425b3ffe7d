"""Strict: all replicas meet in every step (bulk-synchronous), on DDP's reducer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sync.aggregators import Mean
from lightning_sync.comm.groups import discover_topology
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.resolve import is_exact, to_route
from lightning_sync.ddp_hook import CommHook, param_specs
from lightning_sync.precision import loss_scale_of
from lightning_sync.reducer import Reducer
from lightning_sync.strategies import buckets
from lightning_sync.strategies.base import SyncStrategy


class StrictStrategy(SyncStrategy):
    """Average gradients over all ranks in every step, compressed if asked.

    Without a compressor this is DDP: the stock all-reduce, the same bits, no Python in its path. With one, DDP's
    reducer hands each bucket to a communication thread while backward goes on.

    See `SyncStrategy` for all options.
    """

    mode = "strict"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hook: CommHook | None = None
        self._topology: Topology | None = None
        self._gradient_bytes = 0
        self._stepped = False
        if self._ddp_comm_hook is not None and kwargs.get("non_finite") is not None:
            raise ValueError(
                f"StrictStrategy: non_finite={kwargs['non_finite']!r} does not go with ddp_comm_hook, which decides "
                "what is sent and when; look for inf and NaN in the hook."
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
        """Whether this is DDP's own all-reduce: no compressor, the mean, and no two levels asked for."""
        return is_exact(self.effective_compressor) and self.aggregator == Mean() and not self.two_level

    def _register_ddp_hooks(self) -> None:
        """Register the reduction on any device (Lightning registers hooks on CUDA only, and says nothing elsewhere)."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        buckets.pin(model, self._keeper.order_to_pin())
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
            self._hook = CommHook(model, self._reducer, self._executor, self.counters, scale, self._alarms.hand_over())

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
            own = self._weighing.close()
            if self._hook is not None and self._weighing.asked:
                self._hook.weigh(own)

    def after_backward(self) -> None:
        """Raise what the communication thread ran into; count what torch sent in the stock path."""
        if self._hook is not None:
            self._hook.check()
        elif self._topology is not None and getattr(self.model, "require_backward_grad_sync", False):
            sent = self._topology.all_reduce(self._gradient_bytes)
            self.counters.steps += not self._stepped
            self._stepped = True
            self.counters.count(self._gradient_bytes, sent, self._topology.ring_messages)
            self.counters.count_dense(sent)
            self._alarms.check_gradients(self.counters.steps - 1)

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
