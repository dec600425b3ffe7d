"""Writes the Python stacks of this process into a file, from any thread, whatever the others do."""

import faulthandler
import os
import threading
from pathlib import Path

_WAIT = 2.0


class StackFile:
    """Where one rank writes its stacks: ``<folder>/rank-N.txt``.

    Args:
        folder: The folder, made when it is needed; None: nothing is written.
        rank: This rank.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.path = None if folder is None else folder / f"rank-{rank}.txt"
        self._written = False
        self._lock = threading.Lock()

    def dump(self, reason: str) -> None:
        """Write the stacks of all threads under the ``reason``; later ones of one process go below the first.

        Never raises, and waits 2 s at most: the file system may be what hangs.
        """
        if self.path is None:
            return
        thread = threading.Thread(
            target=self._dump, args=(self.path, reason), name="lightning-sync-stacks", daemon=True
        )
        thread.start()
        thread.join(_WAIT)

    def _dump(self, path: Path, reason: str) -> None:
        with self._lock:
            mode = "a" if self._written else "w"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open(mode, encoding="utf-8", errors="replace") as file:
                    self._written = True
                    file.write(f"process {os.getpid()}: {reason.strip()}\n\n")
                    file.flush()
                    faulthandler.dump_traceback(file=file, all_threads=True)
                    file.write("\n")
            except OSError as error:
                text = f"lightning_sync: the stacks cannot be written to {path}: {error}\n"
                os.write(2, text.encode("utf-8", "replace"))
