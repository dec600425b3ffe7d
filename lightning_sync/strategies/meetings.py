"""Collectives of a user's own in a training step, where ranks cannot meet, or are not to."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor


class Meetings(DDPStrategy):
    """Asks, before any collective that Lightning or a user wants through the strategy, whether all ranks will come."""

    mode: str
    _told: set[str] | None = None

    def why_alone(self) -> str | None:
        """Why ranks cannot meet now, as a sentence that goes on from "waits for all ranks, but"; `None`: they can."""
        return None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's; where ranks cannot meet a mean stays this rank's, and the log says so once.

        The mean of integers is a floating-point number: Lightning cuts it off, and divides metrics of ranks that had
        different numbers of batches by it.

        Raises:
            RuntimeError: there, for anything but a mean.
        """
        reason, mean = self.why_alone(), _is_mean(reduce_op)
        if reason is None:
            if mean and isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
                tensor = tensor.to(torch.get_default_dtype())
            return super().reduce(tensor, group, reduce_op)
        if not mean:
            raise RuntimeError(self._refusal(f"reduce(reduce_op={reduce_op!r})", reason))
        self._told = self._told or set()
        if reason not in self._told:
            self._told.add(reason)
            rank_zero_info(
                f"{self.mode}: means over ranks that a training step asks for (self.log(..., sync_dist=True)) stay "
                f"each rank's own value, since {reason}. Means logged for a whole epoch and in validation are taken "
                "over all ranks."
            )
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As Lightning's, but not where ranks cannot meet.

        Raises:
            RuntimeError: there.
        """
        self._refuse_alone("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As Lightning's, but not where ranks cannot meet.

        Raises:
            RuntimeError: there.
        """
        self._refuse_alone("broadcast")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, but not where ranks cannot meet.

        Raises:
            RuntimeError: there.
        """
        self._refuse_alone("barrier")
        super().barrier(*args, **kwargs)

    def _refuse_alone(self, what: str) -> None:
        reason = self.why_alone()
        if reason is not None:
            raise RuntimeError(self._refusal(what, reason))

    def _refusal(self, what: str, reason: str) -> str:
        return (
            f"{what} inside a training step makes every rank wait for every other one, but {reason}. Move it into "
            "validation or an epoch's end, or use strategy='strict' with equally many batches on all ranks."
        )


def _is_mean(reduce_op: Any) -> bool:
    return reduce_op is None or (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"))
