"""Reductions as a DDP communication hook: on any device, with any compressor, under loss scaling."""

# No `from __future__ import annotations` here: torch compares the hook's annotations with classes, not with strings.
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.worker import Executor, Promise
from lightning_sync.marks import GradientMarks
from lightning_sync.reducer import Reducer
from lightning_sync.state import ParamSpec, canonical_name


def param_specs(module: nn.Module) -> list[tuple[ParamSpec, nn.Parameter]]:
    """Every parameter that takes gradients, in registration order, shared ones once."""
    return [
        (ParamSpec(canonical_name(name), tuple(p.shape), p.dtype, p.device), p)
        for name, p in module.named_parameters()
        if p.requires_grad
    ]


@dataclass
class _Bucket:
    """What is left of a `GradBucket` once the hook has returned."""

    names: list[str]
    gradients: list[Tensor]
    promise: Promise


class CommHook:
    """Hands DDP's buckets to a reducer, in bucket order.

    Args:
        model: The DDP-wrapped module; the hook registers itself.
        reducer: What reduces the buckets.
        executor: Where that happens.
        counters: Where steps and waiting are counted.
        loss_scale: Returns the factor by which gradients are multiplied (a `GradScaler`'s scale); `None` without a
            loss scaler. With one, buckets are held until the last, one overflow flag is agreed, and then either all are
            reduced in unscaled units, or none: every gradient becomes inf, so that the scaler skips the step on all
            ranks, and no residual, factor or counter of a compressor moves.

    DDP calls the hook in bucket order on all ranks, and the executor keeps the order, so collectives are issued in one
    order everywhere. State is kept by parameter name: DDP puts other parameters into its buckets after the first step.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        reducer: Reducer,
        executor: Executor,
        counters: Counters,
        loss_scale: Callable[[], float] | None = None,
    ) -> None:
        self.reducer = reducer
        self.executor = executor
        self.counters = counters
        self._loss_scale = loss_scale
        self._names = {id(p): spec.name for spec, p in param_specs(model.module)}
        self._queue: list[_Bucket] = []
        self._backward_ended = 0.0
        self._by_batch = False
        self._new_step = True
        # Which parameters took part is only in question where DDP looks for unused ones.
        named = [(spec.name, p) for spec, p in param_specs(model.module)]
        self._marks = GradientMarks(named) if model.find_unused_parameters or model.static_graph else None
        model.register_comm_hook(None, self.enqueue)

    def enqueue(self, state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue one bucket; DDP waits for the future before the optimiser step."""
        promise = self.executor.promise(bucket.buffer())
        names = [self._names[id(p)] for p in bucket.parameters()]
        self._queue.append(_Bucket(names, bucket.gradients(), promise))
        last = bucket.is_last()
        if last:
            self._backward_ended = time.perf_counter()
        if last or self._loss_scale is None:
            buckets, self._queue = self._queue, []
            job = lambda: self._reduce(buckets, last=last)  # noqa: E731
            where = f"reduction of bucket {bucket.index()} at step {self.counters.steps}"
            self.executor.submit(job, [b.promise for b in buckets], where)
        return promise.future

    def begin_batch(self) -> None:
        """Say that a new batch starts: however many backwards it has, they are one step."""
        self._by_batch = True
        self._new_step = True

    def check(self) -> None:
        """Raise what a reduction raised; call after every backward, before gradients are used."""
        self.executor.check()

    def close(self) -> None:
        """Remove the marks and end the executor. The hook cannot be taken off DDP; a new `fit` makes a new DDP."""
        if self._marks is not None:
            self._marks.close()
        self.executor.close()

    def _unused(self, names: Sequence[str]) -> list[str]:
        """Parameters of the bucket that no rank has used since the last reduction (collective, if in question)."""
        if self._marks is None:
            return []
        used = self._marks.used_anywhere(names, self.reducer)
        return [name for name, any_rank in zip(names, used, strict=True) if not any_rank]

    def _reduce(self, buckets: Sequence[_Bucket], *, last: bool) -> None:
        if self._new_step:
            self.reducer.step = self.counters.steps
            self.counters.steps += 1
            self._new_step = False
        if self._loss_scale is None:
            for bucket in buckets:
                self.reducer.reduce(bucket.names, bucket.gradients, self._unused(bucket.names))
        else:
            self._reduce_scaled(buckets, self._loss_scale())
        if last:
            if self._marks is not None:
                self._marks.clear()
            self._new_step = not self._by_batch
            if self.counters.wait_seconds is not None:
                self.counters.wait_seconds += time.perf_counter() - self._backward_ended

    def _reduce_scaled(self, buckets: Sequence[_Bucket], scale: float) -> None:
        tensors = [t for b in buckets for t in b.gradients]
        finite = torch.stack([t.isfinite().all() for t in tensors]).all()
        # Every rank must take the same branch, so the host has to know the answer: one stop per step, for loss scaling.
        if bool(self.reducer.any((~finite).to(torch.uint8).view(1)).item()):
            for t in tensors:
                t.fill_(float("inf"))
            return
        for bucket in buckets:
            torch._foreach_mul_(bucket.gradients, 1.0 / scale)
            self.reducer.reduce(bucket.names, bucket.gradients, self._unused(bucket.names))
            torch._foreach_mul_(bucket.gradients, scale)
