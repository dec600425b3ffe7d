"""The folder beside a checkpoint: written whole or not at all, and read only when every byte is as it was written."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from lightning_sync.checkpoint.manifest import FileEntry, Manifest, file_name, is_save
from lightning_sync.checkpoint.plain import StateFileError, require
from lightning_sync.checkpoint.rank_state import RankState

MANIFEST = "manifest.json"
_PART = ".part"
_VISIBLE_WITHIN = 10.0


class SyncFolder:
    """State files of the saves under one checkpoint's name: ``<checkpoint>.sync/<save>/rank-00000.pt, ...``.

    Every rank writes its file into ``<save>.part``; rank 0 adds the manifest and moves the folder into place. Only then
    is the ordinary checkpoint written, which names the save. A run that ends in between leaves the older checkpoint
    with the older folder.

    Args:
        checkpoint: Path of the ordinary checkpoint.
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.path = Path(f"{os.fspath(checkpoint)}.sync")

    @classmethod
    def holding(cls, checkpoint: str | os.PathLike[str], save: str) -> SyncFolder | None:
        """The folder that holds a save, whole or damaged, beside the checkpoint or beside what it is a link to."""
        candidates = [cls(checkpoint), cls(os.path.realpath(checkpoint))]
        return next((f for f in candidates if (f.path / save).is_dir()), None)

    def saves(self) -> list[str]:
        """Complete saves, the newest last."""
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if is_save(p.name) and (p / MANIFEST).is_file()]
        return [p.name for p in sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name))]

    def write(self, state: RankState) -> FileEntry:
        """Write one rank's file to its temporary place (each rank its own, at the same time).

        Raises:
            OSError: when there is no space, or no permission; what was there before stays as it was.
        """
        content = state.to_bytes()
        part = self._part(state.save)
        part.mkdir(parents=True, exist_ok=True)
        _write(part / file_name(state.rank), content)
        return FileEntry(len(content), hashlib.sha256(content).hexdigest())

    def commit(self, manifest: Manifest) -> None:
        """Add the manifest and move the save into place (rank 0, once all ranks have written).

        Raises:
            OSError: when that fails, or when files of other ranks do not appear in 10 seconds.
        """
        part = self._part(manifest.save)
        until = time.monotonic() + _VISIBLE_WITHIN  # network file systems show other hosts' files a little later
        for name, entry in manifest.files.items():
            while not (part / name).is_file() or (part / name).stat().st_size != entry.size:
                if time.monotonic() > until:
                    raise OSError(
                        f"{part / name} was written by its rank, but is not visible on the host of rank 0. Save to a "
                        "file system that all hosts share."
                    )
                time.sleep(0.05)
        _write(part / MANIFEST, manifest.to_json().encode())
        _sync_directory(part)
        part.rename(self.path / manifest.save)
        _sync_directory(self.path)

    def prune(self, keep: Collection[str]) -> None:
        """Remove all saves but those in `keep`, and what interrupted ones have left (rank 0)."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.name not in keep and is_save(path.name.removesuffix(_PART)):
                shutil.rmtree(path)

    def discard(self, save: str) -> None:
        """Remove one save, complete or not (rank 0, after a failure)."""
        for path in (self.path / save, self._part(save)):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder, if there is one (rank 0)."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)

    def manifest(self, save: str, checksum: str | None = None) -> Manifest:
        """Read the manifest of a save.

        Args:
            save: Its name.
            checksum: The manifest's checksum, as the ordinary checkpoint has it; `None`: the manifest's own.

        Raises:
            StateFileError: if it is missing or not as it was written.
        """
        require(is_save(save), f"{save!r} is not the name of a save")
        path = self.path / save / MANIFEST
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise StateFileError(f"{path}: {error}") from error
        try:
            manifest = Manifest.parse(text)
            require(manifest.save == save, f"it is the manifest of {manifest.save}")
            if checksum is not None:
                require(manifest.checksum == checksum, "it is not the manifest that the checkpoint was saved with")
        except StateFileError as error:
            raise StateFileError(f"{path}: {error}. Nothing was loaded; use another checkpoint.") from error
        return manifest

    def read(self, manifest: Manifest, rank: int) -> RankState:
        """Read one rank's file: its size and hash first, then its content.

        Raises:
            StateFileError: if it is missing, not as it was written, or not what the manifest says.
        """
        name = file_name(rank)
        require(name in manifest.files, f"the manifest of {manifest.save} lists no file of rank {rank}")
        path, entry = self.path / manifest.save / name, manifest.files[name]
        try:
            size = path.stat().st_size
            require(size == entry.size, f"it has {size} bytes, the manifest says {entry.size}")
            content = path.read_bytes()
            require(hashlib.sha256(content).hexdigest() == entry.sha256, "its SHA-256 is not the manifest's")
            return RankState.parse(content, rank, manifest)
        except (OSError, StateFileError) as error:
            raise StateFileError(f"{path}: {error}. Nothing was loaded; use another checkpoint.") from error

    def _part(self, save: str) -> Path:
        return self.path / f"{save}{_PART}"


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut (POSIX; elsewhere directories cannot be opened)."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
