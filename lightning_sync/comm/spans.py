"""Named spans in the traces of torch's profiler, which cost nothing while nobody profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.autograd.profiler as profiler

PREFIX = "lightning_sync::"
_NOTHING: AbstractContextManager[Any] = nullcontext()


def profiling() -> bool:
    """Whether a profiler runs anywhere in this process."""
    # torch's own `_profiler_enabled()` is about the calling thread alone, and False on all where all are profiled.
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def span(name: str) -> AbstractContextManager[Any]:
    """What happens inside is named in traces; on a thread that the profiler does not see this changes nothing."""
    return profiler.record_function(PREFIX + name) if profiling() else _NOTHING
