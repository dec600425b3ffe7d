"""Finds what an interrupted run goes on from."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_sync.checkpoint import SyncFolder
from lightning_sync.checkpoint.manifest import TAG
from lightning_sync.checkpoint.plain import StateFileError

log = logging.getLogger(__name__)


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in a folder and the folders below it, whatever wrote it.

    The one with the most steps counts as the newest (the later file of two with as many). Complete is a file that can
    be read whole, and whose state of the ranks, if it names any, lies beside it with every file at its full size. What
    is not complete, as a node leaves it that fails while it saves, is passed over with a warning.

    Use it where a run may have been interrupted; every rank must see the same folder::

        trainer.fit(model, ckpt_path=ls.newest_checkpoint("runs/mine"))

    Args:
        folder: Where to look. It need not exist.

    Returns:
        Its path; None if there is none, with which ``fit`` begins at step 0.
    """
    best: tuple[tuple[int, int], str] | None = None
    for path in _candidates(Path(folder)):
        step = _step_if_complete(path)
        if step is None:
            continue
        key = (step, path.stat().st_mtime_ns)
        if best is None or key > best[0]:
            best = key, str(path)
    return None if best is None else best[1]


def _candidates(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.endswith(".sync")]
        yield from (Path(root) / name for name in sorted(files) if name.endswith(".ckpt"))


def _step_if_complete(path: Path) -> int | None:
    """How many steps a checkpoint has seen; None, with a warning, if it is not complete."""
    try:
        if not zipfile.is_zipfile(path):  # its table of contents stands at the end
            raise StateFileError("it ends too early, or is no checkpoint")
        # Mapped, so that only its structure is read.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        step = content["global_step"]
        tag = content.get(TAG)
        if tag is not None:
            _check_ranks(path, tag)
    except Exception as error:  # whatever is wrong with a file, an older one may be good
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        log.warning("%s is passed over: %s", path, reason)
        return None
    return int(step)


def _check_ranks(path: Path, tag: Any) -> None:
    folder = SyncFolder.holding(path, tag["save"])
    if folder is None:
        raise StateFileError(f"the state of its ranks is not beside it ({SyncFolder(path).path})")
    manifest = folder.manifest(tag["save"], tag["checksum"])
    for name, entry in manifest.files.items():
        file = folder.path / tag["save"] / name
        if not file.is_file() or file.stat().st_size != entry.size:
            raise StateFileError(f"{file} is missing or not whole")
