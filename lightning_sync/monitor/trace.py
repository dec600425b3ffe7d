"""A profiler whose traces show what happens on the communication thread, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.profilers import PyTorchProfiler

from lightning_sync import _compat


class TraceProfiler(PyTorchProfiler):
    """Lightning's `PyTorchProfiler`, writing a Chrome trace per rank with all threads in it.

    In it ``lightning_sync::encode``, ``wire`` and ``decode`` are the phases of reductions, on the thread where they
    run, and ``lightning_sync::wait`` is where training stands still for them. Other profilers see the last one only,
    since torch profiles the thread that has started the profiler. Open the ``.pt.trace.json`` files in a browser at
    ``chrome://tracing``, or in Perfetto.

    Args:
        dirpath: Where the traces go.
        filename: Their names begin with it.
        **options: See Lightning's `PyTorchProfiler`; by default few steps are recorded, after one to warm up.
    """

    def __init__(self, dirpath: str | Path = "traces", filename: str = "trace", **options: Any) -> None:
        options.setdefault("experimental_config", _compat.profile_all_threads())
        super().__init__(dirpath=dirpath, filename=filename, **options)
