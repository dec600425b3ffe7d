"""Keeps ranks together that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_sync import _compat
from lightning_sync.checks import check_choice
from lightning_sync.comm.attendance import AskedInStep, Attendance, KnownLengths, NotedInStore
from lightning_sync.comm.board import Board
from lightning_sync.comm.groups import abandon
from lightning_sync.comm.progress import OUT_OF_DATA
from lightning_sync.sampler import SharedSampler
from lightning_sync.strategies.joined import JoinedLoader, joined
from lightning_sync.strategies.uneven import all_lengths, stop_at_shortest

if TYPE_CHECKING:
    from lightning_sync.strategies.base import SyncStrategy

Uneven = Literal["join", "shortest"] | None


class Supply:
    """Follows the training batches of all ranks.

    Args:
        strategy: The strategy it belongs to.
        uneven: See `SyncStrategy`.

    Attributes:
        authority: The lowest rank that had data in the last batch; buffers that one rank gives to all come from it.
    """

    def __init__(self, strategy: SyncStrategy, uneven: Uneven) -> None:
        check_choice(type(strategy).__name__, (None, "join", "shortest"), uneven=uneven)
        self._strategy = strategy
        self._uneven = uneven
        self._loader: JoinedLoader | None = None
        self._limit: int | float | None = None
        self._loaders = 0
        self._group: dist.ProcessGroup | None = None
        self._present: list[bool] | None = None
        self._counts: list[int] | None = None
        self.authority = 0

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def process(self, trainer: Trainer, loader: Any) -> Any:
        """Wrap a training loader if ranks have, or may have, different numbers of batches (collective).

        Raises:
            ValueError: for an option that the loader or the module does not allow.
        """
        strategy = self._strategy
        if self._limit is None:
            self._limit = trainer.limit_train_batches
        trainer.limit_train_batches = self._limit
        self.close_loader()
        lengths = all_lengths(trainer, loader)
        known, self._loaders = min(lengths) >= 0, self._loaders + 1
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, SharedSampler):
            self._attach(sampler, trainer)
        if known and len(set(lengths)) == 1:
            return loader
        reason = self._why_not_join(trainer)
        if self._uneven == "join" and reason is not None:
            raise ValueError(f"uneven='join' does not go with {reason}. Use uneven='shortest', or equal lengths.")
        if self._uneven == "shortest" or reason is not None:
            if known:
                stop_at_shortest(trainer, lengths)
            elif self._uneven == "shortest" and not strategy.lock_step:
                raise ValueError(
                    f"uneven='shortest' needs loaders with a length under strategy={strategy.mode!r}: replicas do not "
                    "wait for one another, so that nobody knows where the shortest ends before others have passed it. "
                    "Use uneven='join'."
                )
            if known or self._uneven != "shortest":
                return loader
        elif known:
            rank_zero_info(
                f"The ranks have {lengths} training batches. Those that run out take part with weight 0 until all are "
                "done (uneven='shortest': all stop at the shortest)."
            )
        attendance = KnownLengths(lengths) if known else self._ask()
        self._loader = joined(loader, attendance, self._miss, all_or_none=self._uneven == "shortest")
        return self._loader

    def _attach(self, sampler: SharedSampler, trainer: Trainer) -> None:
        strategy, reason = self._strategy, self._why_not_join(trainer)
        if reason is not None or self._uneven == "shortest":
            raise ValueError(
                "SharedSampler lets ranks run out of data at different times, which needs uneven='join'; that does not "
                f"go with {reason or repr(self._uneven)}."
            )
        assert strategy._watcher is not None
        board = Board(_compat.default_store(), f"{strategy.store_prefix}/draw/{self._loaders}")
        sampler.attach(board, strategy.global_rank, strategy.world_size, strategy._watcher.check)

    def _why_not_join(self, trainer: Trainer) -> str | None:
        module = trainer.lightning_module
        if not module.automatic_optimization:
            return "manual optimisation: a rank without data cannot know which backwards and steps the others do"
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            return "training_step(dataloader_iter), which fetches its own batches"
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
            return "SyncBatchNorm, whose layers wait for all ranks in every forward"
        return None

    def _ask(self) -> Attendance:
        strategy, watcher = self._strategy, self._strategy._watcher
        assert watcher is not None
        if not strategy.lock_step:
            return NotedInStore(
                _compat.default_store(), f"{strategy.store_prefix}/data/{self._loaders}", strategy.global_rank,
                strategy.world_size, watcher.check,
            )  # fmt: skip
        if self._group is None:
            self._group = dist.new_group(timeout=timedelta(seconds=strategy.group_timeout), backend="gloo")
        return AskedInStep(self._group, strategy.global_rank, strategy.world_size, watcher.check)

    def check_loaders(self, trainer: Trainer) -> None:
        """Refuse what cannot be joined, once all loaders are there.

        Raises:
            ValueError: for several training loaders.
        """
        loader = trainer.train_dataloader
        if self._loader is not None and loader is not self._loader and _number(loader) > 1:
            raise ValueError(
                f"uneven={self._uneven or 'join'!r} does not go with several training loaders whose lengths differ "
                "between ranks, or are not known. Give every rank the same numbers of batches, or combine the loaders "
                "into one data set."
            )

    # ---- training ----------------------------------------------------------------------------------------------------

    @property
    def joining(self) -> bool:
        """Whether ranks may run out of data at different times and go on."""
        return self._loader is not None and self._uneven != "shortest"

    @property
    def spare(self) -> bool:
        """Whether this rank has no data for the batch that has begun."""
        return self._loader is not None and self._loader.spare

    @property
    def short(self) -> bool:
        """Whether some rank is known to have none."""
        return self._present is not None and not all(self._present)

    def begin_batch(self) -> None:
        """The training loop is about to take a batch."""
        if self._loader is not None:
            self._loader.taken += 1

    def attend(self, *, new_window: bool) -> None:
        """The batch is there: note which ranks have data.

        Args:
            new_window: Whether it is the first one after a step.
        """
        if self._loader is None or not self.joining:
            return
        self._present = self._loader.attendance.present(self._loader.index)
        if self._present is None:
            return
        if new_window or self._counts is None:
            self._counts = [0] * len(self._present)
        self._counts = [n + here for n, here in zip(self._counts, self._present, strict=True)]

    def attended(self) -> Sequence[int] | None:
        """Batches of data of each rank since the last call, where that is known to all."""
        counts, self._counts = self._counts, None
        return counts

    def pass_authority(self) -> None:
        """Buffers have been given to all: from now on the rank that goes on with them is the one to ask."""
        if self._present is not None and any(self._present):
            self.authority = self._present.index(True)

    def _miss(self, index: int) -> bool:
        assert self._loader is not None
        watcher = self._strategy._watcher
        if watcher is None:
            return self._loader.attendance.miss(index)
        with watcher.at(OUT_OF_DATA):
            return self._loader.attendance.miss(index)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close_loader(self) -> None:
        """End the thread that belongs to a loader."""
        if self._loader is not None:
            self._loader.attendance.close()
        self._loader = self._present = self._counts = None

    def close(self, trainer: Trainer | None, *, broken: bool) -> None:
        """Leave the trainer as it was; no collective."""
        self.close_loader()
        self._loaders = self.authority = 0
        if trainer is not None and self._limit is not None:
            trainer.limit_train_batches = self._limit
        self._limit = None
        if self._group is not None:
            if broken:
                abandon(self._group)
            elif dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None


def _number(loaders: Any) -> int:
    if isinstance(loaders, dict):
        return sum(map(_number, loaders.values()))
    return sum(map(_number, loaders)) if isinstance(loaders, (list, tuple)) else 1
