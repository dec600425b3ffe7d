"""Saves what an ordinary checkpoint does not hold, beside it, and puts it back."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sync import _compat, compressors
from lightning_sync.checkpoint import FileEntry, Manifest, ParamEntry, RankState, SyncFolder
from lightning_sync.checkpoint.manifest import TAG, file_name, is_save
from lightning_sync.checkpoint.plain import dtype_name, require
from lightning_sync.checkpoint.rngs import generators_state
from lightning_sync.checks import plain_repr
from lightning_sync.comm.board import Board
from lightning_sync.ddp_hook import param_specs
from lightning_sync.strategies import restore
from lightning_sync.strategies.loaders import loader_states, set_loader_states
from lightning_sync.strategies.restore import Found

if TYPE_CHECKING:
    from lightning_sync.strategies.base import SyncStrategy

log = logging.getLogger(__name__)

_SAVE_WITHIN = 1800.0
# When to say how large the state is: above 2 GiB, or 4 times the ordinary checkpoint if that is not a toy's.
_LARGE, _NOTABLE, _TIMES = 2 * 2**30, 64 * 2**20, 4


class Keeper:
    """The part of a strategy that deals with checkpoints.

    Args:
        strategy: The strategy it belongs to.
        watched: Whether the strategy has a watcher during `fit`, which says when a rank has failed.

    Saving takes no collective: each rank writes its file and says so on the store, where rank 0 waits for it and, at
    the same time, for the news that a rank has failed.
    """

    def __init__(self, strategy: SyncStrategy, *, watched: bool = True) -> None:
        self._strategy = strategy
        self._watched = watched
        self._run = ""
        self._count = 0
        self._board: Board | None = None
        self._order: tuple[str, ...] | None = None
        self._newest: dict[Path, str] = {}
        self._found: Found | None = None
        self._ended: tuple[RankState, Manifest] | None = None
        self._said_size = False

    def open(self, run: str) -> None:
        """Begin a fit; `run` is its random id, the same on all ranks."""
        self._run, self._count, self._board, self._order, self._newest = run, 0, None, None, {}
        self._ended, self._said_size = None, False

    def close(self) -> None:
        """End a fit: drop what was found and not used, and keep the state for a save that may follow (no collective).

        It is kept in host memory until the next fit, as Lightning keeps model and optimisers.
        """
        self._found = None
        self._board = None
        strategy = self._strategy
        watcher = strategy._watcher
        if watcher is None or watcher.failure is not None or strategy.trainer_interrupted():
            return
        if self._order is None:
            self._order = self._bucket_order(collective=False)
        try:
            state = self._rank_state("", None).off_device()
        except TypeError as error:  # an optimiser's state holds objects; saving says so, ending a fit need not
            log.debug("The state of rank %d is not kept after fit: %s", strategy.global_rank, error)
            return
        self._ended = state, self._manifest("", {}, self._order)

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
        state, manifest = self._now(save, checkpoint)
        alone = manifest.local == "consensus"
        if rank:
            if not alone:
                self._exchange(save, folder.write(state))
            write()
            return
        try:
            entry = folder.write(state.consensus() if alone else state)
            manifest = replace(manifest, files={file_name(0): entry} if alone else self._exchange(save, entry))
            folder.commit(manifest)
            checkpoint[TAG] = {"save": save, "checksum": manifest.checksum}
            write()
        except BaseException:
            folder.discard(save)
            raise
        self._prune(folder, save)
        self._say_size(manifest, path)

    def _now(self, save: str, checkpoint: Mapping[str, Any]) -> tuple[RankState, Manifest]:
        """What this rank writes, and the manifest without its files; after `fit` as it was at its end."""
        if self._watched and self._strategy._watcher is None:
            assert self._ended is not None
            state, manifest = self._ended
            return replace(state, save=save), replace(manifest, save=save)
        if self._order is None:
            self._order = self._bucket_order(collective=True)
        return self._rank_state(save, loader_states(checkpoint)), self._manifest(save, {}, self._order)

    def _say_size(self, manifest: Manifest, path: str) -> None:
        """Say once how large the state of the ranks is, if it is large."""
        total = sum(f.size for f in manifest.files.values())
        ordinary = os.path.getsize(path) if os.path.isfile(path) else None
        large = total > _LARGE or (ordinary is not None and total > max(_NOTABLE, _TIMES * ordinary))
        if self._said_size or not large:
            return
        self._said_size = True
        beside = "" if ordinary is None else f" beside a checkpoint of {ordinary / 2**20:,.0f} MiB"
        rank_zero_info(
            f"The state of {manifest.world_size} ranks takes {total / 2**20:,.0f} MiB{beside}, in every save that is "
            "kept. save_local='consensus' leaves out what differs by rank, which then starts afresh at a resume."
        )

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
        if self._watched and watcher is None and self._ended is None:
            reason = "there was no fit before, or it failed, and took the state of the ranks with it"
        elif (watcher is not None and watcher.failure is not None) or (
            strategy.trainer_interrupted() and (watcher is None or watcher.stop_at is None)
        ):
            reason = "it is saved after a failure, when ranks cannot wait for each other"
        elif "://" in path:
            reason = "only local and mounted file systems are supported"
        else:
            return True
        rank_zero_warn(f"{path} holds no state of the ranks (residuals, random generators): {reason}.")
        return False

    def _rank_state(self, save: str, loaders: list[Any] | None) -> RankState:
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
            loaders=loaders,
            scaler=None if scaler is None else scaler.state_dict(),
            random=generators_state(strategy.root_device),
        )

    def _exchange(self, save: str, entry: FileEntry) -> dict[str, FileEntry]:
        """Tell rank 0 that this rank has written; on rank 0, wait for all and return their entries."""
        strategy = self._strategy
        watcher = strategy._watcher
        if strategy.world_size == 1:
            return {file_name(0): entry}
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
                if watcher is not None:
                    watcher.check()
                if time.monotonic() > until:
                    raise TimeoutError(f"Rank {rank} has not written its state within {_SAVE_WITHIN:g} s.")
                time.sleep(0.01)
            entries[file_name(rank)] = FileEntry(**json.loads(self._board.read(key)))
        return entries

    def _bucket_order(self, *, collective: bool) -> tuple[str, ...]:
        """The order of DDP's buckets by name; it does not change after the first step."""
        module = self._strategy.lightning_module
        assert module is not None
        names = {p: spec.name for spec, p in param_specs(module)}
        return tuple(names[p] for p in self._strategy.bucket_order(collective=collective))

    def _manifest(self, save: str, files: Mapping[str, FileEntry], order: tuple[str, ...]) -> Manifest:
        strategy = self._strategy
        reducer, module = strategy._reducer, strategy.lightning_module
        assert module is not None
        parameters = {
            spec.name: ParamEntry(
                spec.shape,
                dtype_name(spec.dtype),
                "none" if reducer is None else plain_repr(reducer.compressor_of(spec.name)),
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
            local=strategy.save_local,
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
        manifest = folder.manifest(tag["save"], tag["checksum"])
        self._found = Found(folder, manifest, checkpoint)

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
        found, strategy = self._found, self._strategy
        if found is None:
            return
        now, manifest = self._manifest("", {}, ()), found.manifest
        if manifest.local == "all" and manifest.world_size == strategy.world_size:
            # Lightning takes the loaders' positions from the checkpoint after setup.
            set_loader_states(found.checkpoint, found.read_own(strategy.global_rank).loaders)
        elif loader_states(found.checkpoint):
            rank_zero_warn(
                "Each rank's position in its stateful data loader was not saved, or by another number of ranks: all "
                "begin where rank 0 was. Resume at an epoch's end where that matters."
            )
        if manifest.local == "all" and now.layout == manifest.layout:
            restore.take_over(strategy, found)
        else:
            restore.spread(strategy, found, now)

    def finish(self) -> None:
        """Put back what Lightning would overwrite, once it has loaded the optimisers."""
        found, self._found = self._found, None
        if found is not None:
            restore.finish(self._strategy, found)
