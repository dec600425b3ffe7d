"""The manifest: what a folder of state files holds, sealed with a checksum."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_sync.checkpoint.plain import StateFileError, is_count, require

FORMAT = 2
#: The key under which the ordinary checkpoint names the folder beside it.
TAG = "lightning_sync"
LOCAL = ("all", "consensus")
_SAVE = re.compile(r"[0-9a-f]{16}-[0-9]{6,}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class ParamEntry:
    """A parameter: its shape, the name of its dtype, and how the compressor that serves it prints."""

    shape: tuple[int, ...]
    dtype: str
    compressor: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n


@dataclass(frozen=True)
class Manifest:
    """What one save holds. Two saves with equal `layout` can take each other's files rank for rank.

    Attributes:
        save: Name of the save: the run's random id and a count. The ordinary checkpoint carries it too.
        mode: The strategy's mode, such as ``"strict"``.
        world_size: Number of ranks.
        leaders: For every rank, the first rank of the replica it belongs to.
        nodes: For every rank, the node it was on, where reductions go in two levels; else empty.
        step: Steps so far.
        compressor: The compressor's name, for people.
        parameters: All parameters that take gradients, in registration order.
        ready_order: Parameters in the order of DDP's buckets; empty where there are none to pin.
        files: The rank files by name.
        local: ``"all"``: there is a file of every rank. ``"consensus"``: rank 0's alone, without what differs by rank.
    """

    save: str
    mode: str
    world_size: int
    leaders: tuple[int, ...]
    nodes: tuple[int, ...]
    step: int
    compressor: str
    parameters: Mapping[str, ParamEntry]
    ready_order: tuple[str, ...]
    files: Mapping[str, FileEntry]
    local: str = "all"

    @property
    def layout(self) -> tuple[object, ...]:
        """Everything that decides whether rank r can take over rank r's file as it is."""
        return self.mode, self.world_size, self.leaders, self.nodes, dict(self.parameters)

    @property
    def checksum(self) -> str:
        """SHA-256 of the manifest's content."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"checksum": self.checksum, **json.loads(self._canonical())}, indent=1)

    def _canonical(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read the text of a manifest.

        Raises:
            StateFileError: if it is not valid, or not what was written.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise StateFileError(f"the manifest is not JSON: {error}") from error
        require(isinstance(raw, dict), "the manifest is not a table")
        require(
            raw.get("format") == FORMAT,
            f"the manifest has format {raw.get('format')!r}, this version of lightning_sync reads {FORMAT}",
        )
        fields = {*cls.__dataclass_fields__, "format", "checksum"}
        require(set(raw) == fields, f"the manifest has other fields than {sorted(fields)}: {sorted(raw)}")
        _check(raw)
        manifest = cls(
            save=raw["save"],
            mode=raw["mode"],
            world_size=raw["world_size"],
            leaders=tuple(raw["leaders"]),
            nodes=tuple(raw["nodes"]),
            step=raw["step"],
            compressor=raw["compressor"],
            parameters={
                n: ParamEntry(tuple(p["shape"]), p["dtype"], p["compressor"]) for n, p in raw["parameters"].items()
            },
            ready_order=tuple(raw["ready_order"]),
            files={n: FileEntry(f["size"], f["sha256"]) for n, f in raw["files"].items()},
            local=raw["local"],
        )
        require(manifest.checksum == raw["checksum"], "the manifest's checksum does not match its content")
        require(manifest.to_json() == text, "the manifest says the same in another way than it was written")
        return manifest


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}.pt"


def is_save(name: object) -> bool:
    """Whether this is a well-formed name of a save (and hence a harmless name of a folder)."""
    return isinstance(name, str) and _SAVE.fullmatch(name) is not None


def _check(raw: dict[str, Any]) -> None:
    require(is_save(raw["save"]), f"save={raw['save']!r} is not the name of a save")
    for name in ("mode", "compressor", "checksum"):
        require(isinstance(raw[name], str), f"{name}={raw[name]!r} is not a text")
    for name in ("world_size", "step"):
        require(is_count(raw[name]), f"{name}={raw[name]!r} is not a count")
    n = raw["world_size"]
    require(n >= 1, "world_size is 0")
    for name, lengths in (("leaders", (n,)), ("nodes", (0, n))):
        value = raw[name]
        require(
            isinstance(value, list) and len(value) in lengths and all(is_count(v) for v in value),
            f"{name}={value!r} is not one number for each of {n} ranks",
        )
    require(all(v < n for v in raw["leaders"]), f"leaders={raw['leaders']!r} names a rank that is none of {n}")
    params = raw["parameters"]
    require(isinstance(params, dict), "parameters is not a table")
    for key, p in params.items():
        good = isinstance(p, dict) and set(p) == set(ParamEntry.__dataclass_fields__)
        good = good and isinstance(p["shape"], list) and all(is_count(s) for s in p["shape"])
        require(good and isinstance(p["dtype"], str) and isinstance(p["compressor"], str), f"parameter {key!r}: {p!r}")
    order = raw["ready_order"]
    require(isinstance(order, list) and all(isinstance(k, str) for k in order), "ready_order is not a list of names")
    require(not order or sorted(order) == sorted(params), "ready_order does not name every parameter once")
    files = raw["files"]
    require(raw["local"] in LOCAL, f"local={raw['local']!r} is none of {LOCAL}")
    names = [file_name(r) for r in range(n if raw["local"] == "all" else 1)]
    require(isinstance(files, dict) and sorted(files) == names, f"files must list {names}")
    for name, f in files.items():
        good = isinstance(f, dict) and set(f) == {"size", "sha256"} and is_count(f["size"])
        good = good and isinstance(f["sha256"], str) and _HASH.fullmatch(f["sha256"]) is not None
        require(good, f"{name}: {f!r} is not a size and a SHA-256")
