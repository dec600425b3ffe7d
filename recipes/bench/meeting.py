"""Lining ranks up without the network: files in a folder that all ranks of this machine share.

A barrier over gloo would add to the bytes that are being measured, and would not exist for the method that does not
communicate at all.
"""

from __future__ import annotations

import time
from pathlib import Path


class MeetingError(RuntimeError):
    """A rank did not come, or one called the meeting off; the message says which and why."""


class Meeting:
    """A named series of meeting points for `size` participants.

    Args:
        folder: Folder shared by all participants; made if missing. One meeting series per folder.
        rank: This participant, 0 to `size` - 1.
        size: Number of participants.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder = folder
        self.rank = rank
        self.size = size
        folder.mkdir(parents=True, exist_ok=True)

    def wait(self, point: str, timeout: float) -> None:
        """Return once all participants have called this with the same `point`, each once.

        Args:
            point: Name of the meeting point.
            timeout: Seconds to wait for the others.

        Raises:
            MeetingError: The meeting was called off, or somebody did not come in time.
        """
        (self.folder / f"{point}.{self.rank}").touch()
        missing = set(range(self.size))
        end = time.monotonic() + timeout
        while True:
            missing = {rank for rank in missing if not (self.folder / f"{point}.{rank}").exists()}
            if not missing:
                return
            reason = self.called_off()
            if reason is not None:
                raise MeetingError(f"called off by {reason}")
            if time.monotonic() > end:
                raise MeetingError(f"ranks {sorted(missing)} did not reach {point!r} within {timeout:g} s")
            time.sleep(0.001)

    def call_off(self, reason: str) -> None:
        """Make every present and future `wait` of this series fail, giving `reason`."""
        draft = self.folder / f"reason.{self.rank}"
        draft.write_text(f"rank {self.rank}: {reason}")
        draft.replace(self.folder / f"called_off.{self.rank}")

    def called_off(self) -> str | None:
        """The earliest reason given to `call_off` by any rank, None if nobody did."""
        return called_off(self.folder)


def called_off(folder: Path) -> str | None:
    """The earliest reason why the meetings of a folder were called off, None if they were not."""
    found = [(file.stat().st_mtime_ns, file) for file in folder.glob("called_off.*")]
    return min(found)[1].read_text() if found else None
