"""Gradients that are reduced while the next step runs, and applied after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_sync.clipping import clip_
from lightning_sync.comm.worker import Executor, Promise
from lightning_sync.marks import used_anywhere
from lightning_sync.nonfinite import NonFinite, NonFiniteError, Skips, culprit, culprit_code, first_nonfinite
from lightning_sync.periodic.buffers import BufferMerge
from lightning_sync.reducer import Reducer
from lightning_sync.weights import Contribution, all_zero

Bucket = Sequence[tuple[str, nn.Parameter]]


@dataclass
class Late:
    """Gradients on their way.

    Attributes:
        gradients: By parameter name; this rank's, then everyone's mean, in unscaled units. Inf where a loss scaler has
            to skip the step, empty where all ranks skip it without one.
        skipped: Parameter and rank that had inf or NaN, if the step is skipped.
        weights: The parameters that the gradients were taken at, in order; empty without compensation.
        promise: Completes when they have been reduced.
        own: What they count for; `None`: as much as other ranks'.
    """

    gradients: dict[str, Tensor]
    weights: list[Tensor] = field(default_factory=list)
    promise: Promise | None = None
    own: Contribution | None = None
    skipped: tuple[str, int] | None = None


class GradientDelay:
    r"""Reduces the gradients of step t during the next `delay` steps.

    With d the delay and :math:`g_t` the mean of all ranks' gradients at :math:`w_t`, step t applies :math:`g_{t-d}`;
    the first d steps apply nothing. With compensation, as in DC-ASGD (Zheng et al. 2017, equation 10),

    .. math:: \tilde g = g_{t-d} + \lambda\, g_{t-d} \odot g_{t-d} \odot (w_t - w_{t-d})

    Args:
        buckets: All parameters, in the groups in which they travel.
        reducer: What reduces them.
        executor: Where.
        buffers: Merged along the way, for whoever asks for the consensus.
        delay: d.
        compensation: lambda; 0 is none.
        loss_scale: Returns a loss scaler's factor; `None` without one.
        non_finite: What happens when a gradient holds inf or NaN, before anything is encoded: ``"raise"`` names
            parameter and rank; ``"skip"`` (always with a loss scaler) agrees on it and skips the step on all ranks.
            `None`: nothing.
        ask_which: Whether ranks may use different parameters.
        local_clip_norm: Norm to which this rank's own gradients are clipped before they are reduced; `None`: none.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        reducer: Reducer,
        executor: Executor,
        buffers: BufferMerge,
        *,
        delay: int = 1,
        compensation: float = 0.0,
        loss_scale: Callable[[], float] | None = None,
        non_finite: NonFinite | None = None,
        ask_which: bool = True,
        local_clip_norm: float | None = None,
    ) -> None:
        self.reducer = reducer
        self.buffers = buffers
        self.delay = delay
        self.compensation = compensation
        self.merged_buffers: dict[str, Tensor] = {}
        self._buckets = buckets
        self._named = [(name, p) for bucket in buckets for name, p in bucket]
        self._executor = executor
        self._loss_scale = loss_scale
        self._ask_which = ask_which
        self._clip = local_clip_norm
        self._non_finite = non_finite if loss_scale is None else "skip"
        counters, rank = reducer.wires.world.counters, reducer.wires.world.rank
        self._skips = Skips(counters, speaks=rank == 0, routine=loss_scale is not None)
        self._queues: dict[int, deque[Late]] = {}

    def ready(self, slot: int = 0) -> bool:
        """Whether the next `exchange` of this slot will apply something."""
        return len(self._queues.get(slot, ())) >= self.delay

    def exchange(self, marked: frozenset[str], step: int, slot: int = 0, own: Contribution | None = None) -> bool:
        """Send off the gradients of this step, and put those of `delay` steps ago in their place.

        Args:
            marked: Parameters whose gradients this rank has computed since the last call.
            step: Attempted steps so far.
            slot: Place of this backward among those of its step. Each has its own delay: a backward that touches
                other parameters must not apply its neighbour's.
            own: What these gradients count for; `None`: as much as other ranks'.

        Returns:
            Whether there was something to apply; if not, the marked parameters have no gradient now.
        """
        late = Late({n: p.grad for n, p in self._named if n in marked and p.grad is not None}, own=own)
        if self.compensation:
            late.weights = [p.detach().clone() for _, p in self._named]
        snapshot = self.buffers.snapshot()
        scale = 1.0 if self._loss_scale is None else self._loss_scale()
        late.promise = promise = self._executor.promise(torch.empty(0, device=self.reducer.params[0].device))
        self._executor.submit(
            lambda: self._reduce(late, marked, snapshot, scale, step), [promise], f"reduction of step {step}"
        )
        queue = self._queues.setdefault(slot, deque())
        queue.append(late)
        for name, p in self._named:
            if name in marked:
                p.grad = None
        if len(queue) <= self.delay:
            return False
        self._apply(queue.popleft())
        return True

    def arrive(self) -> None:
        """Wait until nothing is under way; what has arrived is applied when it is due."""
        for queue in self._queues.values():
            for late in queue:
                self._await(late)

    def _await(self, late: Late) -> None:
        if late.promise is not None:
            with self.reducer.wires.world.counters.waiting():
                late.promise.future.wait()
            self._executor.check()
            late.promise = None

    @torch.no_grad()
    def _apply(self, late: Late) -> None:
        self._await(late)
        if late.skipped is None:
            self._skips.taken()
        else:
            self._skips.skipped(self.reducer.step, *late.skipped)
        scale = 1.0 if self._loss_scale is None else self._loss_scale()
        held = list(late.gradients.values())
        if self.compensation and held:
            then = dict(zip((n for n, _ in self._named), late.weights, strict=True))
            now = dict(self._named)
            drift = torch._foreach_sub([now[n] for n in late.gradients], [then[n] for n in late.gradients])
            torch._foreach_mul_(drift, held)
            torch._foreach_mul_(drift, held)
            torch._foreach_add_(held, drift, alpha=self.compensation)
        if scale != 1.0 and held:
            torch._foreach_mul_(held, scale)
        for name, p in self._named:
            if name in late.gradients:
                p.grad = late.gradients[name]

    def _reduce(self, late: Late, marked: frozenset[str], buffers: dict[str, Tensor], scale: float, step: int) -> None:
        """On the communication thread: everything that waits for other ranks."""
        self.reducer.step = step
        if late.own is not None:
            total = self.reducer.weigh(late.own)
            if isinstance(total, float) and total == 0:
                raise all_zero(step, "all ranks")
        names = [name for name, _ in self._named]
        used = used_anywhere(marked, names, self.reducer) if self._ask_which else marked
        for name, p in self._named:
            if name in used and name not in late.gradients:
                late.gradients[name] = torch.zeros_like(p, requires_grad=False)
        late.gradients = {n: late.gradients[n] for n in names if n in used}  # in one order on all ranks
        if not self._skip(late):
            if scale != 1.0 and late.gradients:
                torch._foreach_mul_(list(late.gradients.values()), 1.0 / scale)
            if self._clip is not None and late.gradients:
                clip_(list(late.gradients.values()), self._clip, 1.0 if late.own is None else late.own.ratio)
            present = [[name for name, _ in bucket if name in late.gradients] for bucket in self._buckets]
            self.reducer.reduce_all([(names, [late.gradients[n] for n in names]) for names in present if names])
        if buffers:
            part = None if late.own is None else self.reducer.part
            self.merged_buffers = self.buffers.merge(buffers, self.reducer.wires.world, part)

    def _skip(self, late: Late) -> bool:
        """Whether all ranks skip this step, because one has inf or NaN; then nothing has been encoded."""
        names, held = list(late.gradients), list(late.gradients.values())
        wire = self.reducer.wires.world
        if self._non_finite is None or not held:
            return False
        if self._non_finite == "raise":
            name = first_nonfinite(names, held)
            if name is not None:
                raise NonFiniteError(self.reducer.step, name, wire.rank)
            return False
        # Every rank must take the same branch, so the host has to know the answer.
        code = int(self.reducer.any(culprit_code(held, wire.rank, wire.size)).item())
        late.skipped = culprit(code, names, wire.size)
        if late.skipped is None:
            return False
        if self._loss_scale is None:
            late.gradients = {}
        else:
            for t in held:
                t.fill_(float("inf"))
        return True

    # ---- state -------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that has arrived and waits, by kind and name; the same on all ranks. Call `arrive` first."""
        found: dict[str, dict[str, Tensor]] = {"merged_buffers": dict(self.merged_buffers)}
        for slot, queue in self._queues.items():
            for place, late in enumerate(queue):
                found[f"late/{slot}/{place}"] = {n: g.detach().clone() for n, g in late.gradients.items()}
                if late.weights:
                    names = (n for n, _ in self._named)
                    found[f"late_weights/{slot}/{place}"] = dict(zip(names, late.weights, strict=True))
        return found

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `tensors` returned."""
        self.merged_buffers = {n: t.clone() for n, t in tensors.get("merged_buffers", {}).items()}
        self._queues = {}
        shapes = dict(self._named)
        for kind in sorted((k for k in tensors if k.startswith("late/")), key=lambda k: int(k.split("/")[2])):
            _, slot, _ = kind.split("/")
            weights = tensors.get(kind.replace("late/", "late_weights/"), {})
            late = Late(
                {n: g.to(shapes[n].device).clone() for n, g in tensors[kind].items()},
                [weights[n].to(p.device).clone() for n, p in self._named] if weights else [],
            )
            self._queues.setdefault(int(slot), deque()).append(late)
