"""Saves what an ordinary checkpoint does not hold, beside it, and puts it back."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sync import _compat, compressors
from lightning_sync.checkpoint import FileEntry, Manifest, ParamEntry, RankState, SyncFolder
from lightning_sync.checkpoint.manifest import file_name, is_save
from lightning_sync.checkpoint.plain import dtype_name, require
from lightning_sync.checkpoint.rngs import generators_state
from lightning_sync.comm.board import Board
from lightning_sync.ddp_hook import param_specs
from lightning_sync.strategies import restore
from lightning_sync.strategies.restore import Found

if TYPE_CHECKING:
    from lightning_sync.strategies.base import SyncStrategy

log = logging.getLogger(__name__)

#: The key under which the ordinary checkpoint names the folder beside it.
TAG = "lightning_sync"
_SAVE_WITHIN = 1800.0


class Keeper:
    """The part of a strategy that deals with checkpoints.

    Args:
        strategy: The strategy it belongs to.

    Saving takes no collective: each rank writes its file and says so on the store, where rank 0 waits for it and, at
    the same time, for the news that a rank has failed.
    """

    def __init__(self, strategy: SyncStrategy) -> None:
        self._strategy = strategy
        self._run = ""
        self._count = 0
        self._board: Board | None = None
        self._order: tuple[str, ...] | None = None
        self._newest: dict[Path, str] = {}
        self._found: Found | None = None

    def open(self, run: str) -> None:
        """Begin a fit; `run` is its random id, the same on all ranks."""
        self._run, self._count, self._board, self._order, self._newest = run, 0, None, None, {}

    def close(self) -> None:
        """Drop what was found and not used."""
        self._found = None
        self._board = None

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: str, write: Callable[[], None]) -> None:
        """Write the sync state, then the ordinary checkpoint, then remove what it has replaced (all ranks)."""
        path = path.removeprefix("file://")
        rank, folder = self._strategy.global_rank, SyncFolder(path)
        if not self._has_state(checkpoint, path):
            write()
            if rank == 0 and "://" not in path:
                folder.remove()
            return
        save = f"{self._run}-{self._count:06d}"
        self._count += 1
        if rank:
            self._exchange(save, folder.write(self._rank_state(save)))
            self._bucket_order()
            write()
            return
        try:
            entries = self._exchange(save, folder.write(self._rank_state(save)))
            manifest = self._manifest(save, entries, self._bucket_order())
            folder.commit(manifest)
            checkpoint[TAG] = {"save": save, "checksum": manifest.checksum}
            write()
        except BaseException:
            folder.discard(save)
            raise
        self._prune(folder, save)

    def remove(self, path: str) -> None:
        """Remove the folder beside a checkpoint that is removed (a link has none of its own)."""
        if self._strategy.global_rank == 0 and "://" not in path.removeprefix("file://"):
            SyncFolder(path.removeprefix("file://")).remove()

    def _prune(self, folder: SyncFolder, save: str) -> None:
        """Remove the saves that no checkpoint on disk names any more."""
        before = self._newest.get(folder.path)
        self._newest[folder.path] = save
        if not isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO):
            folder.prune(keep={save})
        elif before is not None:
            # The new checkpoint may still be under way; until it is there, the one on disk names the save before.
            folder.prune(keep={save, before})

    def _has_state(self, checkpoint: Mapping[str, Any], path: str) -> bool:
        if "optimizer_states" not in checkpoint:
            return False
        strategy = self._strategy
        watcher = strategy._watcher
        if watcher is None:
            reason = "it is saved outside of fit, when the state of the ranks is gone"
        elif watcher.failure is not None or (strategy.trainer_interrupted() and watcher.stop_at is None):
            reason = "it is saved after a failure, when ranks cannot wait for each other"
        elif "://" in path:
            reason = "only local and mounted file systems are supported"
        else:
            return True
        rank_zero_warn(f"{path} holds no state of the ranks (residuals, random generators): {reason}.")
        return False

    def _rank_state(self, save: str) -> RankState:
        strategy = self._strategy
        module, reducer = strategy.lightning_module, strategy._reducer
        assert module is not None
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        return RankState(
            save=save,
            rank=strategy.global_rank,
            counters=strategy.counters.state_dict(),
            tensors={} if reducer is None else reducer.state_dict(),
            covers={} if reducer is None else reducer.covers(),
            buffers=restore.buffers_of(module),
            replica=strategy.replica_state(),
            mode=strategy.mode_state(),
            scaler=None if scaler is None else scaler.state_dict(),
            random=generators_state(strategy.root_device),
        )

    def _exchange(self, save: str, entry: FileEntry) -> dict[str, FileEntry]:
        """Tell rank 0 that this rank has written; on rank 0, wait for all and return their entries."""
        strategy = self._strategy
        watcher = strategy._watcher
        assert watcher is not None
        if self._board is None:
            self._board = Board(_compat.default_store(), f"lightning_sync/{self._run}/saves")
        if strategy.global_rank:
            self._board.put(f"{save}/{strategy.global_rank}", json.dumps(asdict(entry)))
            return {}
        entries = {file_name(0): entry}
        until = time.monotonic() + _SAVE_WITHIN
        for rank in range(1, strategy.world_size):
            key = f"{save}/{rank}"
            while not self._board.has(key):
                watcher.check()
                if time.monotonic() > until:
                    raise TimeoutError(f"Rank {rank} has not written its state within {_SAVE_WITHIN:g} s.")
                time.sleep(0.01)
            entries[file_name(rank)] = FileEntry(**json.loads(self._board.read(key)))
        return entries

    def _bucket_order(self) -> tuple[str, ...]:
        """The order of DDP's buckets by name; it does not change after the first step."""
        module = self._strategy.lightning_module
        assert module is not None
        if self._order is None:
            names = {p: spec.name for spec, p in param_specs(module)}
            self._order = tuple(names[p] for p in self._strategy.bucket_order())
        return self._order

    def _manifest(self, save: str, files: Mapping[str, FileEntry], order: tuple[str, ...]) -> Manifest:
        strategy = self._strategy
        reducer, module = strategy._reducer, strategy.lightning_module
        assert module is not None
        parameters = {
            spec.name: ParamEntry(
                spec.shape,
                dtype_name(spec.dtype),
                "none" if reducer is None else _describe(reducer.compressor_of(spec.name)),
            )
            for spec, _ in param_specs(module)
        }
        two_level = reducer is not None and reducer.wires.intra is not None
        return Manifest(
            save=save,
            mode=strategy.mode,
            world_size=strategy.world_size,
            leaders=strategy.leaders(),
            nodes=reducer.wires.world.topology.nodes if reducer is not None and two_level else (),
            step=strategy.counters.steps,
            compressor=compressors.registry.name(strategy.effective_compressor),
            parameters=parameters,
            ready_order=order,
            files=files,
        )

    # ---- loading -----------------------------------------------------------------------------------------------------

    def find(self, checkpoint: Mapping[str, Any], path: str) -> None:
        """Look for the state that belongs to a checkpoint which is being loaded.

        Raises:
            StateFileError: if there is one, but its manifest is damaged (on all ranks alike).
        """
        self._found = None
        trainer = self._strategy.attached_trainer()
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        tag = checkpoint.get(TAG)
        if tag is None:
            rank_zero_info(
                f"{path} holds no state of the ranks: residuals, factors and random generators start afresh."
            )
            return
        require(
            isinstance(tag, dict) and is_save(tag.get("save")) and isinstance(tag.get("checksum"), str),
            f"{path} names its state of the ranks as {tag!r}, which is not valid",
        )
        folder = SyncFolder.holding(path.removeprefix("file://"), tag["save"])
        if folder is None:
            rank_zero_warn(
                f"The state of the ranks that {path} was saved with is not beside it ({SyncFolder(path).path}): "
                "residuals, factors and random generators start afresh. Move both together to keep it."
            )
            return
        self._found = Found(folder, folder.manifest(tag["save"], tag["checksum"]))

    def order_to_pin(self) -> tuple[str, ...]:
        """The order of DDP's buckets in the run that is resumed; empty where there is nothing to keep."""
        found, module = self._found, self._strategy.lightning_module
        if found is None or module is None or found.manifest.world_size != self._strategy.world_size:
            return ()
        order = found.manifest.ready_order
        return order if sorted(order) == sorted(spec.name for spec, _ in param_specs(module)) else ()

    def apply(self) -> None:
        """Put the state back, once groups, reducer and optimisers exist; generators follow in `finish`.

        Raises:
            StateFileError: if a file is not as it was written; then nothing of it is used.
        """
        if self._found is None:
            return
        now = self._manifest("", {}, ())
        if now.layout == self._found.manifest.layout:
            restore.take_over(self._strategy, self._found)
        else:
            restore.spread(self._strategy, self._found, now)

    def finish(self) -> None:
        """Put back what Lightning would overwrite, once it has loaded the optimisers."""
        found, self._found = self._found, None
        if found is not None:
            restore.finish(self._strategy, found)


def _describe(compressor: object) -> str:
    """How a compressor prints, without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(compressor))
