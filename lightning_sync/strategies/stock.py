"""Saves and restores the state of a `WirePrecision` under Lightning's own DDPStrategy, which knows nothing of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sync import _compat
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import agree_on_run_id
from lightning_sync.compressors import Compressor, Route
from lightning_sync.reducer import Reducer
from lightning_sync.strategies import buckets
from lightning_sync.strategies.base import SyncStrategy
from lightning_sync.strategies.hooks import ModeHooks
from lightning_sync.strategies.resume import Keeper

_METHODS = ("save_checkpoint", "remove_checkpoint", "load_optimizer_state_dict")


class StockKeeper(ModeHooks):
    """Stands between Lightning's DDPStrategy and its checkpoints for the time of one `fit`.

    Args:
        strategy: Lightning's strategy, set up as far as the precision plugin's `connect`.
        compressor: The plugin's compressor.
        counters: Where steps and bytes are counted.

    What is saved is what `StrictStrategy` with that compressor saves, so that a run can go on with either.
    """

    mode = "strict"
    save_local = "all"
    _watcher = None

    def __init__(self, strategy: DDPStrategy, compressor: Compressor | Route, counters: Counters) -> None:
        self._stock = strategy
        self.effective_compressor = compressor
        self.counters = counters
        self._reducer: Reducer | None = None
        self._keeper = Keeper(cast(SyncStrategy, self), watched=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def open(self) -> None:
        """Look for state beside the checkpoint that is being resumed, and take the buckets' layout from it."""
        self._keeper.open(agree_on_run_id(self._stock.root_device))
        trainer = self.attached_trainer()
        assert trainer is not None
        checkpoint = _compat.loaded_checkpoint(trainer)
        if checkpoint and trainer.ckpt_path:
            self._keeper.find(checkpoint, os.fspath(trainer.ckpt_path))
        model = self._stock.model
        assert isinstance(model, DistributedDataParallel)
        buckets.pin(model, self._keeper.order_to_pin())

    def apply(self, reducer: Reducer) -> None:
        """Put the state into the reducer, and watch the strategy's checkpoints until `close`."""
        self._reducer = reducer
        self._keeper.apply()
        for name in _METHODS:
            setattr(self._stock, name, getattr(self, f"_{name}")(getattr(self._stock, name)))

    def close(self) -> None:
        """Leave the strategy as it was."""
        for name in _METHODS:
            vars(self._stock).pop(name, None)
        self._keeper.close()

    def attached_trainer(self) -> Trainer | None:  # noqa: D102 - as SyncStrategy's
        module = self._stock.lightning_module
        return None if module is None or module._trainer is None else module.trainer

    def trainer_interrupted(self) -> bool:  # noqa: D102 - as SyncStrategy's
        trainer = self.attached_trainer()
        return trainer is not None and trainer.interrupted

    def after_backward(self) -> None:  # noqa: D102 - inherited
        raise NotImplementedError

    def bucket_order(self, *, collective: bool = True) -> Sequence[nn.Parameter]:  # noqa: D102 - inherited
        model = self._stock.model
        assert isinstance(model, DistributedDataParallel)
        return buckets.bucket_order(model, collective=collective)

    def _save_checkpoint(self, stock: Callable[..., None]) -> Callable[..., None]:
        def save(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            self._keeper.save(checkpoint, os.fspath(filepath), lambda: stock(checkpoint, filepath, storage_options))

        return save

    def _remove_checkpoint(self, stock: Callable[..., None]) -> Callable[..., None]:
        def remove(filepath: Any) -> None:
            stock(filepath)
            self._keeper.remove(os.fspath(filepath))

        return remove

    def _load_optimizer_state_dict(self, stock: Callable[..., None]) -> Callable[..., None]:
        def load(checkpoint: Mapping[str, Any]) -> None:
            stock(checkpoint)
            self._keeper.finish()

        return load
