"""What a rank writes down while it trains: one JSON object per line, only ever appended to.

A file ``rank-N.jsonl`` holds a ``start`` record per start of training, then ``step`` and ``validation`` records, and an
``end`` record if training has ended well. Every line is handed to the operating system at once, so that a process that
is killed leaves all of them but, at worst, half of the last. Totals count from the start of the run.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Where a run's records lie in its directory.
FOLDER = "telemetry"
FORMAT = 1

log = logging.getLogger(__name__)


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.jsonl"


class Recorder:
    """Appends records to a rank's file. A disk that is full ends the records, with a warning, not the training.

    Args:
        folder: Made if it is missing.
        rank: Whose records these are.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / file_name(rank)
        self._open = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            self._give_up(error)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one record; a number that is not finite becomes null."""
        if not self._open:
            return
        record = {"kind": kind, **{name: _finite(value) for name, value in values.items()}}
        # The leading line break ends a line that a killed process has left half written; readers skip empty ones.
        line = ("\n" if kind == "start" else "") + json.dumps(record, allow_nan=False) + "\n"
        try:
            # Opened for every record, once in many steps: a run may end without telling anybody.
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write nothing from now on."""
        self._open = False

    def _give_up(self, error: OSError) -> None:
        self._open = False
        log.warning("Telemetry is no longer written to %s: %s. Training goes on without it.", self.path, error)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
