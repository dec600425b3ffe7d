"""No file that was changed is ever used, and nothing in a file is ever run."""

import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sync.checkpoint import Manifest, StateFileError, SyncFolder
from lightning_sync.checkpoint.describe import describe
from lightning_sync.checkpoint.manifest import file_name
from lightning_sync.compressors import BlockInt8, ErrorFeedback, PowerSGD, Route
from tests.checkpoint.files import SAVE, fill, rank_states, reducers, save

MIXED = Route([("a", PowerSGD(rank=1, warmup_steps=0)), ("*", ErrorFeedback(BlockInt8(64)))])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Manifest]:
    made = reducers(MIXED, (0, 0, 0))
    fill(made)
    checkpoint = tmp_path / "last.ckpt"
    return checkpoint, save(checkpoint, rank_states(made))


def read_all(checkpoint: Path, checksum: str | None) -> None:
    """What a resume reads, on all ranks."""
    folder = SyncFolder.holding(checkpoint, SAVE)
    assert folder is not None, "a resume would start afresh, with a warning"
    manifest = folder.manifest(SAVE, checksum)
    for rank in range(manifest.world_size):
        folder.read(manifest, rank)


Mutate = Callable[[random.Random, Path], None]


def truncate(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def flip(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def append(rng: random.Random, path: Path) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 50)))


def zero(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) - 8)
    content[start : start + 8] = bytes(8) if any(content[start : start + 8]) else b"\xff" * 8
    path.write_bytes(content)


def remove(rng: random.Random, path: Path) -> None:
    path.unlink()


def space(rng: random.Random, path: Path) -> None:
    """In a manifest this may change nothing of what it says."""
    content = path.read_bytes()
    start = rng.choice([i for i, byte in enumerate(content) if byte in b" \n"])
    path.write_bytes(content[:start] + b" " + content[start:])


def swap(rng: random.Random, path: Path) -> None:
    others = sorted(p for p in path.parent.iterdir() if p != path)
    other = rng.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


@pytest.mark.parametrize("mutate", [truncate, flip, append, zero, remove, space, swap], ids=lambda f: f.__name__)
def test_seventy_mutations_of_each_sort_are_refused(mutate: Mutate, saved: tuple[Path, Manifest]) -> None:
    checkpoint, manifest = saved
    folder = SyncFolder(checkpoint).path / SAVE
    good = {p: p.read_bytes() for p in sorted(folder.iterdir())}
    read_all(checkpoint, manifest.checksum)
    rng = random.Random(mutate.__name__)
    for turn in range(70):
        mutate(rng, rng.choice(list(good)))
        with pytest.raises(StateFileError) as refused:
            read_all(checkpoint, manifest.checksum)
        assert str(refused.value), turn
        for path, content in good.items():
            path.write_bytes(content)
    read_all(checkpoint, manifest.checksum)


def swap_values(raw: dict[str, Any], first: str, second: str) -> None:
    raw[first], raw[second] = raw[second], raw[first]


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda m: m.update(format=1),
    "no format": lambda m: m.pop("format"),
    "an unknown field": lambda m: m.update(extra=1),
    "a missing field": lambda m: m.pop("nodes"),
    "fewer ranks": lambda m: m.update(world_size=2),
    "no ranks": lambda m: m.update(world_size=0),
    "ranks as text": lambda m: m.update(world_size="3"),
    "ranks as truth": lambda m: m.update(world_size=True),
    "a negative step": lambda m: m.update(step=-1),
    "a path for a save": lambda m: m.update(save="../../etc"),
    "another save": lambda m: m.update(save="0123456789abcdef-000003"),
    "mode and step swapped": lambda m: swap_values(m, "mode", "step"),
    "mode and compressor swapped": lambda m: swap_values(m, "mode", "compressor"),
    "leaders and nodes swapped": lambda m: swap_values(m, "leaders", "nodes"),
    "files of two ranks swapped": lambda m: swap_values(m["files"], file_name(0), file_name(1)),
    "a file less": lambda m: m["files"].pop(file_name(2)),
    "a file elsewhere": lambda m: m["files"].update({"../x": m["files"].pop(file_name(2))}),
    "a size that is wrong": lambda m: m["files"][file_name(0)].update(size=1),
    "a hash that is none": lambda m: m["files"][file_name(0)].update(sha256="z" * 64),
    "local as something else": lambda m: m.update(local="some"),
    "only consensus, with the files of all": lambda m: m.update(local="consensus"),
    "a leader that is no rank": lambda m: m["leaders"].__setitem__(0, 3),
    "a smaller parameter": lambda m: m["parameters"]["a"].update(shape=[1, 1]),
    "a parameter less": lambda m: m["parameters"].pop("b"),
    "a negative shape": lambda m: m["parameters"]["a"].update(shape=[-40, -30]),
    "another order": lambda m: m["ready_order"].reverse(),
    "an order with a name twice": lambda m: m["ready_order"].__setitem__(0, "a"),
    "parameters as a list": lambda m: m.update(parameters=[]),
}


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize("sealed", [False, True], ids=["checksum as it was", "checksum made anew"])
def test_changed_manifests_are_refused(name: str, sealed: bool, saved: tuple[Path, Manifest]) -> None:
    """The ordinary checkpoint holds the manifest's checksum too, so that making it anew does not help."""
    checkpoint, manifest = saved
    path = SyncFolder(checkpoint).path / SAVE / "manifest.json"
    raw = json.loads(path.read_text())
    MANIFESTS[name](raw)
    path.write_text(json.dumps(raw))
    if sealed:
        seal(path, raw)
    with pytest.raises(StateFileError):
        read_all(checkpoint, manifest.checksum)


def seal(path: Path, raw: dict[str, Any]) -> None:
    """Give a changed manifest the checksum of its content."""
    import hashlib

    raw.pop("checksum", None)
    text = json.dumps(raw, separators=(",", ":"))
    path.write_text(json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), **raw}, indent=1))


def test_a_manifest_that_is_not_text_is_refused(saved: tuple[Path, Manifest]) -> None:
    checkpoint, manifest = saved
    path = SyncFolder(checkpoint).path / SAVE / "manifest.json"
    for content in (b"", b"[]", b"{", b"\xff\xfe", b"null", b"1" * 10_000):
        path.write_bytes(content)
        with pytest.raises(StateFileError):
            read_all(checkpoint, manifest.checksum)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_file_is_not_run_even_with_the_right_hash(saved: tuple[Path, Manifest], tmp_path: Path) -> None:
    checkpoint, _ = saved
    target = tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save({"format": 2, "rank": Bomb(target)}, buffer)
    resign(checkpoint, buffer.getvalue())
    with pytest.raises(StateFileError, match="rank 0 is not readable"):
        read_all(checkpoint, None)
    assert not target.exists()


def contents(checkpoint: Path, rank: int = 0) -> dict[str, Any]:
    path = SyncFolder(checkpoint).path / SAVE / file_name(rank)
    return dict(torch.load(path, weights_only=True))


RANK_FILES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of another rank": lambda s: s.update(rank=1),
    "of another save": lambda s: s.update(save="0123456789abcdef-000003"),
    "another format": lambda s: s.update(format=0),
    "a field less": lambda s: s.pop("scaler"),
    "tensors and covers swapped": lambda s: swap_values(s, "tensors", "covers"),
    "buffers and random swapped": lambda s: swap_values(s, "buffers", "random"),
    "two kinds swapped": lambda s: swap_values(s["tensors"], "residual", "owner_residual"),
    "two parameters swapped": lambda s: swap_values(s["tensors"]["owner_residual"], "b", "odd"),
    "a shorter tensor": lambda s: s["tensors"]["residual"].update(b=torch.zeros(3)),
    "a number for a tensor": lambda s: s["tensors"]["residual"].update(b=1.0),
    "a sparse tensor": lambda s: s["tensors"]["residual"].update(b=torch.zeros(1216).to_sparse()),
    "a cover of another parameter": lambda s: s["covers"]["residual"]["b"].__setitem__(0, "nowhere"),
    "a cover beyond the end": lambda s: s["covers"]["residual"]["b"].__setitem__(1, 10),
    "a cover that stands still": lambda s: s["covers"]["residual"]["b"].__setitem__(4, 0),
    "steps as text": lambda s: s["counters"].update(steps="7"),
    "counters as a list": lambda s: s.update(counters=[7]),
    "a replica without parameters": lambda s: s["replica"].pop("parameters"),
    "a mode without numbers": lambda s: s["mode"].pop("numbers"),
    "a mode with more": lambda s: s["mode"].update(more={}),
    "a mode as a list": lambda s: s.update(mode=[]),
    "a tensor for a number": lambda s: s["mode"]["numbers"].update(clock=torch.tensor(3)),
    "a list for a number": lambda s: s["mode"]["numbers"].update(clock=[3]),
    "a number without a name": lambda s: s["mode"]["numbers"].update({3: 3}),
    "replicated and numbers swapped": lambda s: swap_values(s["mode"], "replicated", "numbers"),
    "a kind that is a tensor": lambda s: s["mode"]["local"].update(pushed=torch.zeros(3)),
    "a kind of numbers": lambda s: s["mode"]["replicated"].update(anchor={"a": 2.0}),
    "a kind without a name": lambda s: s["mode"]["local"].update({1: {}}),
    "a sparse anchor": lambda s: s["mode"]["replicated"]["anchor"].update(a=torch.zeros(9).to_sparse()),
    "loaders as a table": lambda s: s.update(loaders={}),
    "loaders and scaler swapped": lambda s: swap_values(s, "loaders", "scaler"),
    "a scaler as a number": lambda s: s.update(scaler=1.0),
}


@pytest.mark.parametrize("name", RANK_FILES)
def test_rank_files_that_contradict_themselves_are_refused(name: str, saved: tuple[Path, Manifest]) -> None:
    """Even when hash and manifest were made anew to fit."""
    checkpoint, _ = saved
    state = contents(checkpoint)
    RANK_FILES[name](state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    resign(checkpoint, buffer.getvalue())
    with pytest.raises(StateFileError):
        read_all(checkpoint, None)


def resign(checkpoint: Path, content: bytes, rank: int = 0) -> None:
    """Put `content` in place of a rank's file and make the manifest agree."""
    import hashlib

    folder = SyncFolder(checkpoint).path / SAVE
    (folder / file_name(rank)).write_bytes(content)
    raw = json.loads((folder / "manifest.json").read_text())
    raw["files"][file_name(rank)] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal(folder / "manifest.json", raw)


def test_replicated_state_is_in_the_file_of_rank_0_alone(saved: tuple[Path, Manifest]) -> None:
    checkpoint, _ = saved
    state = contents(checkpoint, rank=2)
    assert state["mode"]["replicated"] == {"anchor": {}, "outer": {}}
    assert float(state["mode"]["local"]["pushed"]["a"][0]) == 2
    state["mode"]["replicated"]["anchor"] = {"a": torch.ones(3)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    resign(checkpoint, buffer.getvalue(), rank=2)
    with pytest.raises(StateFileError, match="belong to rank 0"):
        read_all(checkpoint, None)


def test_an_unchanged_file_that_is_signed_anew_is_read(saved: tuple[Path, Manifest]) -> None:
    """So the refusals above are not for the signing itself."""
    checkpoint, _ = saved
    buffer = io.BytesIO()
    torch.save(contents(checkpoint), buffer)
    resign(checkpoint, buffer.getvalue())
    read_all(checkpoint, None)


def test_an_archive_of_something_else_is_refused(saved: tuple[Path, Manifest]) -> None:
    checkpoint, _ = saved
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("hello", "world")
    for content in (buffer.getvalue(), b"", b"PK\x03\x04", b"text"):
        resign(checkpoint, content)
        with pytest.raises(StateFileError, match="rank 0 is not readable"):
            read_all(checkpoint, None)


def test_inspect_tells_what_is_inside_and_refuses_what_is_damaged(saved: tuple[Path, Manifest]) -> None:
    checkpoint, _ = saved
    text = describe(checkpoint)
    assert text == describe(f"{checkpoint}.sync")
    for expected in (
        "strict, compressor int8",
        "step        7",
        "rank 2:",
        "owner_residual",
        "scale 1024.0",
        "clock 5",
        "anchor",
        "pushed",
    ):
        assert expected in text
    flip(random.Random(0), SyncFolder(checkpoint).path / SAVE / file_name(2))
    with pytest.raises(StateFileError, match="SHA-256"):
        describe(checkpoint)
