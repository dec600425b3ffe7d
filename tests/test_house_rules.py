"""Rules of this code base that a reviewer should not have to remember."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_sync as ls

PACKAGE = Path(ls.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The core serves Fabric, a plain loop, or anything else: it imports torch, never Lightning or Hydra.
CORE = (
    "aggregator_contract",
    "aggregators",
    "asynchronous",
    "checks",
    "checkpoint",
    "clipping",
    "cluster",
    "comm",
    "compressors",
    "contract",
    "ddp_hook",
    "delay",
    "drift",
    "marks",
    "nonfinite",
    "periodic",
    "planner",
    "reducer",
    "registry",
    "replica",
    "rounds",
    "sampler",
    "state",
    "testing",
    "two_level",
    "validity",
    "weights",
)
OUTSIDE = ("lightning", "pytorch_lightning", "lightning_fabric", "hydra", "omegaconf")
# Inside the core: compressors know state and the arithmetic of bytes, aggregators payloads, the wire no strategy.
ONLY = {
    "aggregators": ("aggregators", "comm.topology", "compressors.base", "registry"),
    "asynchronous": (
        "asynchronous",
        "checks",
        "comm",
        "compressors",
        "nonfinite",
        "periodic.local_updates",
        "periodic.outer",
        "registry",
        "state",
    ),
    "checkpoint": ("checkpoint", "reducer", "state"),
    "comm": ("comm", "compressors.base", "state"),
    "compressors": ("checks", "comm.topology", "compressors", "registry", "state"),
    "checks": (),
    "cluster": ("checkpoint", "cluster"),
    "clipping": ("weights",),
    "drift": ("comm.groups", "comm.worker"),
    "nonfinite": ("comm.counters",),
    "periodic": ("checks", "comm", "compressors.base", "nonfinite", "periodic", "reducer", "state", "weights"),
    "registry": (),
    "rounds": ("comm.wire", "compressors.base"),
    "sampler": ("checks", "comm.board"),
    "state": (),
    "two_level": ("comm.topology", "compressors.base", "state"),
    "weights": (),
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


@pytest.mark.parametrize("path", [p for p in FILES if is_in(module_of(p), CORE)], ids=module_of)
def test_the_core_imports_neither_lightning_nor_what_stands_on_it(path: Path) -> None:
    for name in imports(path):
        assert not is_in(name, OUTSIDE), f"{module_of(path)} imports {name}"
        if name.startswith("lightning_sync."):
            inner = name.removeprefix("lightning_sync.")
            assert is_in(inner, CORE), f"{module_of(path)} imports {name}, which is not part of the core"
            layer = module_of(path).split(".")[0]
            # `from lightning_sync.comm import x` also yields the bare package, which holds nothing.
            if layer in ONLY and inner not in ("comm", "compressors"):
                assert is_in(inner, ONLY[layer]), f"{module_of(path)} imports {name}"


def test_every_module_of_the_core_exists() -> None:
    found = {module_of(p).split(".")[0] for p in FILES}
    assert set(CORE) <= found


def test_examples_know_nothing_of_this_package() -> None:
    for path in (PACKAGE / "examples").glob("*.py"):
        foreign = [n for n in imports(path) if is_in(n, ("lightning_sync",)) and not is_in(n[15:], ("examples",))]
        assert not foreign, path


def test_hydra_is_needed_by_the_entry_only() -> None:
    for path in FILES:
        if not is_in(module_of(path), ("entry", "train", "cli")):
            assert not [name for name in imports(path) if is_in(name, ("hydra", "omegaconf"))], path


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        names = set(imports(path))
        assert not names & {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert not called.endswith(("_object", "_object_list")), f"{path}:{node.lineno}: {called} pickles"
            assert called not in ("eval", "exec"), f"{path}:{node.lineno}"
            if called == "torch.load":
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("weights_only") == "True", f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{module_of(path)} has {lines} lines; give it one job"


def test_importing_starts_nothing() -> None:
    code = """
import multiprocessing, threading
import torch
before = set(threading.enumerate())
import lightning_sync, lightning_sync.testing
assert set(threading.enumerate()) == before, threading.enumerate()
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert not multiprocessing.active_children()
import sys
assert "hydra" not in sys.modules and "sklearn" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", ls.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(ls, name)
    assert inspect.isclass(thing) or inspect.isfunction(thing), f"{name} is neither a class nor a function"
    text = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"
    for method, value in own_methods(thing):
        assert inspect.getdoc(getattr(thing, method)) or value.__doc__, f"{name}.{method} has no docstring"
    described = "\n".join(c.__doc__ or "" for c in getattr(thing, "__mro__", [thing]))
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            assert f"{parameter.name}:" in described, f"{name}({parameter.name}=...) is not described"


def own_methods(thing: Any) -> list[tuple[str, Any]]:
    if not inspect.isclass(thing):
        return []
    return [(n, v) for n, v in vars(thing).items() if inspect.isfunction(v) and not n.startswith("_")]


def test_all_is_sorted_out() -> None:
    assert len(set(ls.__all__)) == len(ls.__all__)
    assert ls.__version__


def test_warnings_are_errors_and_every_test_has_a_deadline(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("filterwarnings")[0] == "error"
    assert 0 < float(pytestconfig.getini("timeout")) <= 300
