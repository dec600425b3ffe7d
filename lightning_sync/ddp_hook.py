"""Reductions as a DDP communication hook: on any device, with any compressor, under loss scaling."""

# No `from __future__ import annotations` here: torch compares the hook's annotations with classes, not with strings.
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_sync.clipping import clip_
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.spans import profiling, span
from lightning_sync.comm.worker import Executor, Promise
from lightning_sync.marks import GradientMarks
from lightning_sync.nonfinite import (
    NonFinite,
    NonFiniteError,
    Skips,
    culprit,
    culprit_code,
    drop_gradients,
    first_nonfinite,
)
from lightning_sync.reducer import Reducer
from lightning_sync.state import ParamSpec, canonical_name
from lightning_sync.weights import Contribution, Weight, all_zero


def param_specs(module: nn.Module) -> list[tuple[ParamSpec, nn.Parameter]]:
    """Every parameter that takes gradients, in registration order, shared ones once."""
    roles: dict[int, str] = {}
    for owner in module.modules():
        for p in owner.parameters(recurse=False):
            roles.setdefault(id(p), type(owner).__name__)
    return [
        (ParamSpec(canonical_name(name), tuple(p.shape), p.dtype, p.device, role=roles[id(p)]), p)
        for name, p in module.named_parameters()
        if p.requires_grad
    ]


@dataclass
class _Bucket:
    """What is left of a `GradBucket` once the hook has returned."""

    names: list[str]
    buffer: Tensor
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
            loss scaler. Gradients are reduced in unscaled units.
        non_finite: What happens when a gradient holds inf or NaN. ``"skip"`` (by default with a loss scaler): buckets
            are held until the last, one flag is agreed, and then either all are reduced, or none: no residual, factor
            or counter of a compressor moves, and the step is skipped on all ranks. With a loss scaler every gradient
            becomes inf, so that the scaler skips; without, every gradient becomes None, which no optimiser acts on.
            ``"raise"`` (by default without): the rank that has it raises `NonFiniteError`, before it encodes (on CUDA,
            where a look in every bucket would stop the host, once per step, before the optimiser).
        local_clip_norm: Norm to which this rank's own gradient is clipped, all buckets together, before anything is
            reduced; `None`: none. Buckets are held.

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
        non_finite: NonFinite | None = None,
        local_clip_norm: float | None = None,
    ) -> None:
        self.reducer = reducer
        self.executor = executor
        self.counters = counters
        self._loss_scale = loss_scale
        self._non_finite = non_finite or ("raise" if loss_scale is None else "skip")
        self._clip = local_clip_norm
        self._ratio: Weight = 1.0
        self._held = loss_scale is not None or self._non_finite == "skip" or local_clip_norm is not None
        self._skips = Skips(counters, speaks=reducer.wires.world.rank == 0, routine=loss_scale is not None)
        self._skipped: tuple[str, int] | None = None
        self._unread: list[Tensor] = []
        self._reduced = False
        self._queue: list[_Bucket] = []
        self._backward_ended = 0.0
        self._by_batch = False
        self._new_step = True
        # Which parameters took part is only in question where DDP looks for unused ones.
        named = [(spec.name, p) for spec, p in param_specs(model.module)]
        self._names = {id(p): name for name, p in named}
        self._parameters = [p for _, p in named]
        self._marks = GradientMarks(named) if model.find_unused_parameters or model.static_graph else None
        model.register_comm_hook(None, self.enqueue)

    def enqueue(self, state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue one bucket; DDP waits for the future before the optimiser step."""
        promise = self.executor.promise(bucket.buffer())
        names = [self._names[id(p)] for p in bucket.parameters()]
        self._queue.append(_Bucket(names, bucket.buffer(), bucket.gradients(), promise))
        last = bucket.is_last()
        if last:
            self._backward_ended = time.perf_counter()
        if last or not self._held:
            buckets, self._queue = self._queue, []
            job = lambda: self._reduce(buckets, last=last)  # noqa: E731
            where = f"reduction of bucket {bucket.index()} at step {self.counters.steps}"
            self.executor.submit(job, [b.promise for b in buckets], where)
        if last and profiling() and bucket.buffer().device.type == "cpu":
            # DDP waits in C++, where no span can be put around it; this waits before it does, at the end of backward.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _wait_for(promise))
        return promise.future

    def begin_batch(self) -> None:
        """Say that a new batch starts: however many backwards it has, they are one step."""
        self._by_batch = True
        self._new_step = True

    def weigh(self, own: Contribution, known: Sequence[float] | None = None) -> None:
        """Agree on what each rank counts for in the reduction that follows; call before its backward.

        Args:
            own: This rank's.
            known: The weights of all ranks, where nobody has to be asked.
        """
        step, self._ratio = self.counters.steps, own.ratio

        def agree() -> None:
            self.reducer.step = step
            total = self.reducer.weigh(own, known)
            if isinstance(total, float) and total == 0:
                raise all_zero(step, "all ranks")

        self.executor.submit(agree, [], f"weighing of step {step}")

    def check(self) -> None:
        """Raise what a reduction raised, or skip the step; call after every backward, before gradients are used."""
        self.executor.check()
        if not self._reduced:  # a backward that only accumulates
            return
        self._reduced = False
        self._read()
        skipped, self._skipped = self._skipped, None
        if skipped is None:
            self._skips.taken()
            return
        if self._loss_scale is None:
            drop_gradients(self._parameters)
        self._skips.skipped(self.reducer.step, *skipped)

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
        if self._held:
            self._reduce_held(buckets, None if self._loss_scale is None else self._loss_scale())
        else:
            for bucket in buckets:
                self._reduce_watched(bucket)
        if last:
            self._reduced = True
            if self._marks is not None:
                self._marks.clear()
            self._new_step = not self._by_batch
            if self.counters.wait_seconds is not None:
                self.counters.wait_seconds += time.perf_counter() - self._backward_ended

    def _reduce_watched(self, bucket: _Bucket) -> None:
        """Reduce a bucket, unless it is not finite; on CUDA, where to know that stops the host, note it for `_read`."""
        on_cpu = bucket.buffer.device.type == "cpu"
        name = first_nonfinite(bucket.names, bucket.gradients) if on_cpu else None
        if name is not None:
            raise NonFiniteError(self.reducer.step, name, self.reducer.wires.world.rank)
        flags = [] if on_cpu else [~bucket.buffer.isfinite().all()]
        self.reducer.reduce(bucket.names, bucket.gradients, self._unused(bucket.names))
        if flags:
            self._unread.append(torch.stack([*flags, ~bucket.buffer.isfinite().all()]))

    def _read(self) -> None:
        """Raise, on all ranks, for a step whose gradients were not finite: the only stop of the host (not run yet)."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        here, anywhere = torch.stack(unread).any(0).tolist()
        if here or anywhere:
            held = [(self._names[id(p)], p.grad) for p in self._parameters if p.grad is not None]
            name = first_nonfinite([n for n, _ in held], [g for _, g in held]) or "a parameter"
            raise NonFiniteError(self.reducer.step, name, self.reducer.wires.world.rank if here else None)

    def _reduce_held(self, buckets: Sequence[_Bucket], scale: float | None) -> None:
        names = [name for b in buckets for name in b.names]
        tensors = [t for b in buckets for t in b.gradients]
        wire = self.reducer.wires.world
        # Every rank must take the same branch, so the host has to know the answer: one stop per step.
        code = int(self.reducer.any(culprit_code(tensors, wire.rank, wire.size)).item())
        self._skipped = culprit(code, names, wire.size)
        if self._skipped is not None:
            if self._non_finite == "raise":
                raise NonFiniteError(self.reducer.step, *self._skipped)
            if scale is not None:
                for t in tensors:
                    t.fill_(float("inf"))
            return
        if scale is not None:
            torch._foreach_mul_(tensors, 1.0 / scale)
        if self._clip is not None:
            clip_(tensors, self._clip, self._ratio)
        for bucket in buckets:
            self.reducer.reduce(bucket.names, bucket.gradients, self._unused(bucket.names))
            if scale is not None:
                torch._foreach_mul_(bucket.gradients, scale)


def _wait_for(promise: Promise) -> None:
    with span("wait"):
        promise.future.wait()
