"""Strict at first: the base of modes whose replicas begin by averaging their gradients over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_sync.checks import check_integer
from lightning_sync.comm.groups import Wires
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors import Exact, as_route
from lightning_sync.ddp_hook import param_specs
from lightning_sync.periodic import inner_state
from lightning_sync.reducer import Reducer
from lightning_sync.strategies.unwrapped import UnwrappedStrategy


class WarmedStrategy(UnwrappedStrategy):
    """Base of modes that may begin strict: replicas stay equal, bit for bit, until the warm-up ends.

    Args:
        warmup_steps: Steps at the beginning in which gradients are reduced over all ranks, exactly, as in strict. More
            keeps replicas together for longer, and all ranks wait for the slowest one in each of them.
        **kwargs: See `UnwrappedStrategy`.
    """

    def __init__(self, *args: Any, warmup_steps: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_integer(type(self).__name__, 0, warmup_steps=warmup_steps)
        self.warmup_steps = warmup_steps
        self._warm: Reducer | None = None

    def _prepare_warm_up(self, wires: Wires) -> None:
        """Make what averages over all ranks, on `wires` that the gradients' thread may use."""
        if self.warmup_steps:
            assert self.model is not None
            specs = [spec for spec, _ in param_specs(self.model)]
            self._warm = Reducer(specs, as_route(Exact()), wires, self.aggregator, self.seed)

    @property
    def _step(self) -> int:
        """Steps since the warm-up ended; the first one after it is 1."""
        return self.counters.steps - self.warmup_steps

    def gradient_reducer(self) -> Reducer:
        """Over all ranks while warming up, then over the replica."""
        return self._warm if self._warm is not None and self._step < 0 else super().gradient_reducer()

    def _average_moments(self, params: Sequence[Tensor], wire: GroupWire) -> None:
        """Let replicas that were apart begin a warm-up: with equal optimisers it keeps them equal (collective)."""
        moments = inner_state.averageable(self.optimizers, params)
        self.run_job(lambda: inner_state.average(moments, wire), "averaging moments")

    def _close(self) -> None:
        super()._close()
        self._warm = None
