"""What one rank saves: the content of its file, checked before anybody uses it."""

from __future__ import annotations

import io
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_sync.checkpoint.manifest import Manifest
from lightning_sync.checkpoint.mode_state import ModeState
from lightning_sync.checkpoint.plain import StateFileError, is_count, is_tensors, require, to_plain
from lightning_sync.state import Cover

FORMAT = 2
_OWN = {"counters", "tensors", "covers", "buffers", "replica", "mode", "loaders", "scaler", "random"}
_FIELDS = {"format", "save", "rank"} | _OWN


@dataclass
class ReplicaState:
    """What the first rank of a replica keeps for it, where replicas differ.

    Attributes:
        parameters: All parameters by name.
        optimizers: The optimisers' states by parameter name, see `lightning_sync.checkpoint.optimizers`.
    """

    parameters: dict[str, Tensor]
    optimizers: list[dict[str, Any]]


@dataclass
class RankState:
    """Everything that one rank keeps between steps and an ordinary checkpoint does not hold.

    Attributes:
        save: Name of the save it belongs to.
        rank: The rank.
        counters: Steps and bytes so far, see `Counters.state_dict`.
        tensors: The compressors' tensors, ``{kind: {parameter: tensor}}``.
        covers: Which elements the tensors of undelivered kinds stand for.
        buffers: This rank's buffers, which may differ from rank 0's.
        replica: Set on the first rank of each replica, where replicas differ.
        mode: What the mode keeps for itself.
        loaders: States of this rank's stateful data loaders, if all could be saved.
        scaler: State of the loss scaler, if there is one.
        random: States of the random generators, see `lightning_sync.checkpoint.rngs`.
    """

    save: str
    rank: int
    counters: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    covers: dict[str, dict[str, Cover]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    replica: ReplicaState | None = None
    mode: ModeState = field(default_factory=ModeState)
    loaders: list[Any] | None = None
    scaler: dict[str, Any] | None = None
    random: dict[str, Any] = field(default_factory=dict)

    def consensus(self) -> RankState:
        """What all ranks share, out of rank 0's state: of what differs by rank, the names of its kinds alone."""
        shared = {
            kind: {name: t for name, t in tensors.items() if name not in self.covers.get(kind, {})}
            for kind, tensors in self.tensors.items()
        }
        mode = ModeState(self.mode.numbers, self.mode.replicated, {kind: {} for kind in self.mode.local})
        return RankState(self.save, self.rank, self.counters, shared, mode=mode)

    def off_device(self) -> RankState:
        """The same, with all tensors in host memory."""
        where = "state"
        replica, mode = self.replica, self.mode
        return replace(
            self,
            tensors=to_plain(self.tensors, where, copy=False),
            buffers=to_plain(self.buffers, where, copy=False),
            replica=None if replica is None else ReplicaState(**to_plain(vars(replica), where, copy=False)),
            mode=ModeState(**to_plain(vars(mode), where, copy=False)),
        )

    def to_bytes(self) -> bytes:
        """The file's content: tensors and primitives only.

        Raises:
            TypeError: if anything else is among them, such as an object in an optimiser's state.
        """
        plain = to_plain(
            {
                "format": FORMAT,
                **{name: getattr(self, name) for name in _FIELDS - {"format", "covers", "replica", "mode"}},
                "covers": {k: {n: list(astuple(c)) for n, c in covers.items()} for k, covers in self.covers.items()},
                "replica": None if self.replica is None else dict(vars(self.replica)),
                "mode": dict(vars(self.mode.as_saved_by(self.rank))),
            },
            "state",
        )
        buffer = io.BytesIO()
        torch.save(plain, buffer)
        return buffer.getvalue()

    @classmethod
    def parse(cls, content: bytes, rank: int, manifest: Manifest) -> RankState:
        """Read the content of rank `rank`'s file, which must agree with the manifest.

        Raises:
            StateFileError: if it does not.
        """
        try:
            raw = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a damaged archive; all mean the same here
            raise StateFileError(f"the file of rank {rank} is not readable: {type(error).__name__}: {error}") from error
        require(isinstance(raw, dict) and set(raw) == _FIELDS, f"the file of rank {rank} has other fields")
        require(raw["format"] == FORMAT, f"the file of rank {rank} has format {raw['format']!r}, not {FORMAT}")
        require(
            raw["save"] == manifest.save, f"the file of rank {rank} is of save {raw['save']!r}, not {manifest.save}"
        )
        require(raw["rank"] == rank, f"the file of rank {rank} holds the state of rank {raw['rank']!r}")
        replica = raw["replica"]
        if replica is not None:
            require(isinstance(replica, dict) and set(replica) == {"parameters", "optimizers"}, "replica: other fields")
            require(is_tensors(replica["parameters"]), "replica: parameters are not tensors by name")
            require(isinstance(replica["optimizers"], list), "replica: optimizers is not a list")
        require(is_tensors(raw["buffers"]), f"rank {rank}: buffers are not tensors by name")
        for name in ("counters", "random"):
            require(isinstance(raw[name], dict), f"rank {rank}: {name} is not a table")
        require(raw["loaders"] is None or isinstance(raw["loaders"], list), f"rank {rank}: loaders is not a list")
        require(raw["scaler"] is None or isinstance(raw["scaler"], dict), f"rank {rank}: scaler is not a table")
        require(is_count(raw["counters"].get("steps")), f"rank {rank}: counters hold no count of steps")
        tensors, covers = raw["tensors"], _covers(raw["covers"], rank, manifest)
        require(isinstance(tensors, dict) and all(map(is_tensors, tensors.values())), f"rank {rank}: bad tensors")
        for kind, owned in covers.items():
            require(owned.keys() <= tensors.get(kind, {}).keys(), f"rank {rank}: {kind!r} covers other parameters")
            for key, cover in owned.items():
                n = tensors[kind][key].numel()
                require(n == cover.rows * cover.block, f"rank {rank}: {kind} of {key!r} has {n} elements, not {cover}")
        return cls(
            save=raw["save"],
            rank=rank,
            counters=raw["counters"],
            tensors=tensors,
            covers=covers,
            buffers=raw["buffers"],
            replica=None if replica is None else ReplicaState(**replica),
            mode=ModeState.parse(raw["mode"], rank),
            loaders=raw["loaders"],
            scaler=raw["scaler"],
            random=raw["random"],
        )


def _covers(raw: object, rank: int, manifest: Manifest) -> dict[str, dict[str, Cover]]:
    require(isinstance(raw, dict) and all(isinstance(v, dict) for v in raw.values()), f"rank {rank}: bad covers")
    assert isinstance(raw, dict)
    covers: dict[str, dict[str, Cover]] = {}
    for kind, owned in raw.items():
        for key, value in owned.items():
            good = isinstance(value, list) and len(value) == 6 and isinstance(value[0], str)
            require(good and all(is_count(v) for v in value[1:]), f"rank {rank}: {kind} of {key!r} covers {value!r}")
            cover = Cover(*value)
            param = manifest.parameters.get(cover.name)
            require(param is not None, f"rank {rank}: {kind} of {key!r}: the manifest has no parameter {cover.name!r}")
            assert param is not None
            require(
                cover.start + cover.numel <= param.numel and cover.stride > 0 and cover.block > 0,
                f"rank {rank}: {kind} of {key!r} reaches beyond the parameter of shape {param.shape}",
            )
            covers.setdefault(kind, {})[key] = cover
    return covers
