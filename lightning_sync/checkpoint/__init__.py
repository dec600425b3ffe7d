"""What an ordinary checkpoint does not hold: the state of every rank, in a folder beside it."""

from lightning_sync.checkpoint.folder import SyncFolder
from lightning_sync.checkpoint.manifest import FileEntry, Manifest, ParamEntry
from lightning_sync.checkpoint.mode_state import ModeState
from lightning_sync.checkpoint.plain import StateFileError
from lightning_sync.checkpoint.rank_state import RankState, ReplicaState

__all__ = [
    "FileEntry",
    "Manifest",
    "ModeState",
    "ParamEntry",
    "RankState",
    "ReplicaState",
    "StateFileError",
    "SyncFolder",
]
