"""What a mode may say, beside when its replicas meet."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from lightning_sync.checkpoint import ModeState, ReplicaState
from lightning_sync.reducer import Reducer
from lightning_sync.state import undelivered_norm


class ModeHooks:
    """The methods by which `SyncStrategy` asks its subclasses; all but one have a default.

    Attributes:
        mode: The mode's name in logs, saved state and the table of what composes.
        equal_buffers: Whether buffers, too, are equal inside a replica whenever a step is over.
    """

    mode: str
    equal_buffers: ClassVar[bool] = False
    world_size: int
    _reducer: Reducer | None

    @abstractmethod
    def after_backward(self) -> None:
        """Called when gradients are complete, before `on_after_backward`, clipping and the optimiser step."""

    def begin_batch(self) -> None:
        """Called before every training batch."""

    def before_backward(self) -> None:
        """Called before every backward, once it is known what its batch weighs."""

    def leaders(self) -> tuple[int, ...]:
        """For every rank, the first rank of its replica: 0 where all replicas are equal after every step."""
        return (0,) * self.world_size

    def replica_state(self) -> ReplicaState | None:
        """What has to be saved of this rank's replica, if replicas differ and this is its first rank."""
        return None

    def mode_state(self) -> ModeState:
        """What this mode keeps between steps for itself, such as an anchor (nothing here); it is copied at once."""
        return ModeState()

    def load_mode_state(self, state: ModeState, *, same: bool) -> Sequence[str]:
        """Put back what `mode_state` returned, after setup and before the first step.

        Args:
            state: This rank's own, bit for bit, or in another layout rank 0's without what was local.
            same: Whether ranks, replicas, mode and compressors are those of the run that saved it.

        Returns:
            What starts afresh, in words for the log.
        """
        return [", ".join(state.kinds)]

    def takes_state_of(self, mode: str) -> bool:
        """Whether `load_mode_state` can do something with the state of a run in this mode."""
        return mode == self.mode

    def bucket_order(self, *, collective: bool = True) -> Sequence[nn.Parameter]:
        """The parameters in the order in which they lie in buckets, if that order is found out by training.

        Args:
            collective: Whether all ranks ask, so that it may be found out by communicating.
        """
        return ()

    def telemetry(self) -> dict[str, float | Tensor]:
        """What is known now on this rank, beside the totals in ``counters`` (no collective; called every few steps).

        Names are those of ``sync/...`` metrics; a scalar tensor is read by whoever asks. Here ``residual_norm``: what
        compressors still owe. A mode adds what it alone knows: ``period``, ``consensus_distance``, ``staleness``,
        ``clock_lead``.
        """
        norm = None if self._reducer is None else undelivered_norm(self._reducer.states())
        return {} if norm is None else {"residual_norm": norm}
