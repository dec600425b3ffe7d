"""Fused kernels: torch's compiler makes one pass over memory of what takes a dozen eagerly, with the same bits.

A kernel is compiled once per machine type and version (20 to 60 s on one core), at setup, and kept in a file, so that
later runs load it within seconds. Where there is no C++ compiler, or compiling fails, everything runs eagerly, and the
log says so. Inductor's ahead-of-time form is used on the CPU: no guards, no compiling in the middle of a step, and
Python's lock is free while a kernel runs.

``TORCH_COMPILE_DISABLE=1``, torch's own switch, turns it off. ``TORCHINDUCTOR_CACHE_DIR`` moves the files.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

Kernel = Callable[..., Any]
Functions = dict[str, tuple[Callable[..., Any], Sequence[Tensor]]]
"""By name: a function of tensors, and arguments to compile it with."""

# Inductor would write intermediate results that several others read to memory; here recomputing them is cheaper.
OPTIONS = {
    "realize_reads_threshold": 100_000,
    "realize_acc_reads_threshold": 100_000,
    "realize_opcount_threshold": 100_000,
    "cpp.dynamic_threads": True,  # as many as torch uses where the kernel runs, not where it was compiled
}


def can_compile(device: torch.device) -> bool:
    """Whether kernels for this device can be made on this machine."""
    if os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1":
        return False
    if device.type != "cpu":
        return device.type == "cuda"
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", default)) is not None


def compile_kernels(name: str, functions: Functions, sources: Sequence[object]) -> dict[str, Kernel] | None:
    """Compile functions of tensors, or load them from an earlier run.

    Args:
        name: What they belong to, with all options that change them.
        functions: What to compile. The first axis of arguments with two axes is left open; everything else is fixed.
        sources: Classes, functions and modules whose source decides what is compiled; changed source is compiled anew.

    Returns:
        The compiled functions by name, or `None` if something went wrong, which the log tells.
    """
    try:
        (device,) = {a.device for _, example in functions.values() for a in example}
        if device.type != "cpu":
            return {key: _just_in_time(function, example) for key, (function, example) in functions.items()}
        return _ahead_of_time(name, functions, sources)
    except Exception as error:
        log.warning("%s runs eagerly, since torch cannot compile it here: %s: %s", name, type(error).__name__, error)
        return None


def _just_in_time(function: Callable[..., Any], example: Sequence[Tensor]) -> Kernel:
    """For CUDA (not run on GPUs yet). torch keeps what it compiles by itself."""
    kernel: Kernel = torch.compile(function, fullgraph=True, options=dict(OPTIONS))

    @torch.no_grad()
    def call(*arguments: Tensor) -> Any:
        return kernel(*arguments)

    for argument in example:
        if argument.dim() == 2:
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    call(*example)
    return call


def _ahead_of_time(name: str, functions: Functions, sources: Sequence[object]) -> dict[str, Kernel]:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    identity = _identity(name, sources)
    paths = {key: folder / f"{hashlib.sha256(f'{identity} {key}'.encode()).hexdigest()[:32]}.pt2" for key in functions}
    with _locked(folder / "lock"):  # ranks of one machine: one compiles, the others wait, and load
        missing = [key for key, path in paths.items() if not path.exists()]
        if missing:
            log.warning(
                "Compiling %d kernels for %s, once on this machine; about %d s.", len(missing), name, 20 * len(missing)
            )
            start = time.monotonic()
            for key in missing:
                function, example = functions[key]
                _compile(function, example, paths[key])
            log.warning("Compiled in %.0f s; kept in %s.", time.monotonic() - start, folder)
    return {key: _load(path) for key, path in paths.items()}


def _load(path: Path) -> Kernel:
    """A kernel without what its wrapper does for nested arguments, which takes longer than a small kernel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = torch._inductor.aoti_load_package(str(path))
    except Exception:
        path.unlink(missing_ok=True)  # damaged: the next run makes it anew
        raise
    run = getattr(model.loader, "boxed_run", None) or model.loader.run
    return lambda *arguments: run([*arguments])


class _Graph(nn.Module):
    """What torch.export takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(*arguments)


def _compile(function: Callable[..., Any], example: Sequence[Tensor], path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=2**31)
    shapes = tuple({0: rows} if a.dim() == 2 else None for a in example)
    # Inductor names its file itself where it must end in .pt2, and another rank must never see half a file.
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's own deprecations
            graph = torch.export.export(_Graph(function), tuple(example), dynamic_shapes=(shapes,))
            torch._inductor.aoti_compile_and_package(
                graph, package_path=str(unfinished), inductor_configs=dict(OPTIONS)
            )
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `TORCHINDUCTOR_CACHE_DIR`, else the user's cache."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lightning_sync"


def _identity(name: str, sources: Sequence[object]) -> str:
    """Everything that a compiled kernel depends on. It uses every instruction this processor has."""
    texts = []
    for source in sources:
        path = inspect.getsourcefile(source)  # type: ignore[arg-type]
        assert path is not None
        texts.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
    machine = [platform.system(), platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()]
    return repr([name, texts, torch.__version__, sys.version_info[:2], machine, sorted(OPTIONS.items())])


def _processor() -> str:
    """The processor's instructions, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this machine at a time; on systems without such locks, several compile the same."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file frees the lock
