"""Deep gradient compression: what made sparse gradients learn as well as dense ones, each part a wrapper of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.checks import check_integer, check_positive
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Reduction
from lightning_sync.compressors.topk import ChunkTopK, check_ratio
from lightning_sync.compressors.wrapper import Remembering, Wrapper
from lightning_sync.state import ParamSpec, State

PIECE = 2**18
"""Elements that are worked on at a time, so that intermediate results stay small."""


@dataclass(frozen=True)
class MomentumCorrection(Remembering):
    r"""Keep back velocities instead of gradients, so that what is sent late has gathered momentum (Lin et al. 2018).

    With u_r the velocity and v_r the residual of rank r, C what the compressor sends, and w_r the rank's share (1/N):

    .. math::
        u_r \leftarrow m u_r + w_r g_r, \qquad v_r \leftarrow v_r + u_r, \qquad c_r = C(v_r), \qquad
        v_r \leftarrow v_r - c_r, \qquad m_r = \textstyle\sum_r c_r

    Then u_r is set to zero where something was sent (momentum factor masking): old velocity would push elements that
    were sent late in a stale direction (Lin et al., section 3.2 and equation 7).

    The result holds momentum already: **train with an optimiser without momentum**, such as ``SGD(momentum=0)``. Meant
    for sparse compressors: a dense one sends something everywhere, so that nothing is left of u, and this is plain
    error feedback. A velocity belongs to its rank: over other numbers of ranks it starts afresh.

    Payload, pattern and alignment are the inner compressor's. Memory: one float32 per element more than error feedback,
    and two copies of the bucket that is encoded.

    Args:
        inner: The compressor, such as `ChunkTopK`.
        momentum: m in [0, 1). Larger: longer memory. 0 is error feedback.

    Raises:
        ValueError, TypeError: for a momentum out of range, or an `inner` that cannot keep what it does not send.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.momentum, bool) or not 0 <= self.momentum < 1:
            raise ValueError(f"MomentumCorrection(momentum={self.momentum!r}): expected a number in [0, 1).")

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        state = super().init(params)
        if params:
            state.arena("velocity", {p.key: p.numel for p in params}, params[0].state_dtype, params[0].device)
        return state

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        if state.left_out:  # what is sent now reaches nobody: velocities wait as residuals do
            return (yield from self.inner.reduce_late(keys, tensors, state, 1.0))
        sizes = [t.numel() for t in tensors]
        velocity = state.arenas["velocity"].bind(keys)
        views = [v.view(t.shape) for v, t in zip(velocity.split(sizes), tensors, strict=True)]
        velocity.mul_(self.momentum)
        torch._foreach_add_(views, list(tensors), alpha=state.share)

        state.declare()
        state.arenas["residual"].bind(keys)
        residuals = [state.arenas["residual"][k][:n] for k, n in zip(keys, sizes, strict=True)]
        expected = torch._foreach_add(residuals, list(velocity.split(sizes)))
        run = self.inner.reduce_late(keys, [v.clone() for v in views], replace(state, share=1.0), 1.0)
        payload = next(run)
        for own, before, key, n in zip(velocity.split(sizes), expected, keys, sizes, strict=True):
            # The residual has changed where something was sent, and there only. (NaN differs from anything.)
            after = state.arenas["residual"][key][:n]
            for u, b, a in zip(own.split(PIECE), before.split(PIECE), after.split(PIECE), strict=True):
                u.copy_(torch.where(b == a, u, 0))
        del expected
        while True:
            answer = yield payload
            try:
                payload = run.send(answer)
            except StopIteration as stop:
                torch._foreach_copy_(list(tensors), list(stop.value))
                return tensors


@dataclass(frozen=True)
class LocalClipping(Wrapper):
    r"""Clip every rank's gradients before they are compressed (Lin et al. 2018, section 3.3).

    .. math:: g \leftarrow g \min\Bigl(1, \frac{c}{\sqrt{N}\, \|g\|}\Bigr)

    for the gradient g of each parameter: with independent noise on N ranks their mean then has a norm of about c at
    most. Clipping after the reduction would not do: error feedback believes that what it sent was applied. Lin et al.
    clip by the norm over all parameters, which is not known while some of them are still travelling. With two levels N
    is the number of nodes, and g the mean over a node. NaN and inf stay visible.

    Args:
        inner: Any compressor.
        max_norm: c, above 0, in units of the unscaled gradient. Lower: clips more.

    Raises:
        ValueError: for a norm that is not above 0.
    """

    max_norm: float = 1.0
    alignment = None  # norms of whole parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("LocalClipping", max_norm=self.max_norm)

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        self._clip_(tensors, state)
        return (yield from super().reduce(keys, tensors, state))

    @override
    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        self._clip_(tensors, state)
        return (yield from super().reduce_late(keys, tensors, state, decay))

    def _clip_(self, tensors: Sequence[Tensor], state: State) -> None:
        if state.share == 0:  # this rank takes no part
            return
        # What is given here times the share is the contribution to the mean: g / N.
        largest = self.max_norm / (state.world_size * math.sqrt(state.world_size) * state.share)
        norms = torch.stack(
            torch._foreach_norm(
                [t.reshape(-1) for t in tensors], 2, dtype=torch.promote_types(torch.float32, tensors[0].dtype)
            )
        )
        factors = (largest / norms).clamp_(max=1)  # 0 for inf, and inf * 0 is NaN
        torch._foreach_mul_(list(tensors), list(factors.to(tensors[0].dtype).unbind(0)))


@dataclass(frozen=True)
class RatioWarmup(Wrapper):
    r"""Send more of the gradient at first (Lin et al. 2018, section 3.4: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %).

    In step t the inner compressor works with ``ratio = ratios[t // every]``, and with its own ratio after the last of
    them. What it keeps stays with it. Early gradients change quickly, and sent late they point in stale directions.

    Args:
        inner: A compressor with a `ratio`, such as `ChunkTopK` or `RandomBlock`.
        ratios: The ratios of the warm-up, in (0, 1]; usually falling.
        every: Steps with each of them. Larger: a longer, dearer warm-up.

    Raises:
        ValueError, TypeError: for ratios out of range, or an `inner` without a ratio.
    """

    ratios: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004)
    every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ratios", tuple(self.ratios))  # a list from a YAML
        check_integer("RatioWarmup", 1, every=self.every)
        for ratio in self.ratios:
            check_ratio("RatioWarmup", ratios=ratio)
        if "ratio" not in {f.name for f in fields(cast(Any, self.inner))}:
            raise TypeError(f"RatioWarmup(inner={self.inner!r}): expected a compressor with a ratio.")

    def at(self, step: int | None) -> Compressor:
        """The compressor of this step (`None`: after the warm-up)."""
        stage = len(self.ratios) if step is None else step // self.every
        if stage >= len(self.ratios):
            return self.inner
        return replace(cast(Any, self.inner), ratio=self.ratios[stage])  # type: ignore[no-any-return]

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        return (yield from self.at(state.step).reduce(keys, tensors, state))

    @override
    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        return (yield from self.at(state.step).reduce_late(keys, tensors, state, decay))

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        return self.at(step).wire_bytes(params, topology, step)


def dgc() -> MomentumCorrection:
    """Deep gradient compression with its usual numbers: 0.1 % of the gradient, momentum 0.9, a ratio that falls."""
    return MomentumCorrection(RatioWarmup(ChunkTopK(ratio=0.001)))
