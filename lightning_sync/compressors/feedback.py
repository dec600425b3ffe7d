"""Error feedback: remember what was not sent, and send it later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Reduction
from lightning_sync.compressors.blocks import (
    BlockCodec,
    block_plan,
    feedback_arenas,
    feedback_covers,
    owner_residual,
    worker_residual,
)
from lightning_sync.compressors.finite import finite_rows, forget_
from lightning_sync.state import ParamSpec, State


@dataclass(frozen=True)
class ErrorFeedback(Compressor):
    r"""Wrap a block codec so that nothing is lost, only late.

    Each rank keeps a residual e_r (float32 or wider, in units of the mean) per parameter, and each owner a residual
    f of the blocks it owns. With C the codec and w_r the rank's share (1/N):

    .. math::
        x_r &= \beta e_r + w_r g_r, \qquad c_r = C(x_r), \qquad e_r \leftarrow x_r - c_r \\
        y &= \beta f + \textstyle\sum_r c_r, \qquad m = C(y), \qquad f \leftarrow y - m

    m is what every rank gets. With decay 1 the sums telescope: over any number of steps, all that was delivered plus
    what the residuals hold is the true sum of the means. (Seide et al. 2014; Karimireddy et al. 2019, algorithm 2; both
    ends as in Tang et al. 2019, DoubleSqueeze.) A block with inf or NaN makes this step's result non-finite, as it
    would without compression, and its residual starts again from zero: later steps are sound.

    Under another aggregator than the mean, A in place of the sum: every rank's stream of contributions still telescopes
    (what it sent plus e_r is what it meant to send), and so does the result (what was delivered plus f is the sum of
    the A of what was sent). But A of late contributions is not A of the true ones: what a rank could not send in one
    step is judged with those of a later one. A rank of share 0, whose row A leaves out, keeps its residual as it is.

    Args:
        inner: The codec.
        decay: beta in (0, 1]. Below 1, old residuals fade: less staleness, but the sums no longer telescope.
    """

    inner: BlockCodec
    decay: float = 1.0
    biased: ClassVar[bool] = False
    aggregates: ClassVar[bool] = True
    by_parameter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, BlockCodec):
            raise TypeError(
                f"ErrorFeedback(inner={self.inner!r}): inner must be a BlockCodec (such as BlockInt8). Casts need no "
                "error feedback, and PowerSGD keeps its own."
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"ErrorFeedback(decay={self.decay!r}): decay must lie in (0, 1].")

    @property
    @override
    def alignment(self) -> int | None:  # type: ignore[override]
        return self.inner.alignment

    @override
    def accepts(self, param: ParamSpec) -> bool:
        return self.inner.accepts(param)

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        state = self.inner.init(params)
        state.lazy.update(feedback_arenas(self.inner.block))
        state.undelivered.update(feedback_covers(self.inner.block))
        return state

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        codec = self.inner
        plan = block_plan(codec.block, keys, state)
        # The residual is the work buffer: it becomes x, then x - C(x), without another copy of the gradient.
        residual = worker_residual(codec.block, keys, state)
        if state.left_out:
            code = codec.encode(residual)  # read by nobody; the other ranks wait for something of this size
        else:
            if self.decay != 1:
                residual.mul_(self.decay)
            torch._foreach_add_(plan.views(residual), list(tensors), alpha=state.share)
            code = self._encode_(residual)
        owned = yield plan.exchange(code)
        late = owner_residual(codec.block, keys, state)
        if self.decay != 1:
            late.mul_(self.decay)
        late.add_((yield from state.aggregate(codec.decode(owned.tensors, plan.dtype), plan.counts)))
        everything = yield plan.gather(self._encode_(late))
        return plan.write(codec.decode(plan.restore(everything.tensors), plan.dtype), tensors)

    def _encode_(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Encode, leaving the residual; a block with inf or NaN shows in the result once, and starts afresh."""
        code = self.inner.encode_(blocks)
        forget_(blocks, finite_rows(blocks))
        return code

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        return self.inner.wire_bytes(params, topology, step)
