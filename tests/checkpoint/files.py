"""Saves made without a process group: reducers of many ranks in one process, filled with random state."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_sync.checkpoint import FileEntry, Manifest, ModeState, ParamEntry, RankState, ReplicaState, SyncFolder
from lightning_sync.checkpoint.manifest import file_name
from lightning_sync.checkpoint.plain import dtype_name
from lightning_sync.checkpoint.rngs import generators_state
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import Wires
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors import Route
from lightning_sync.reducer import Reducer
from lightning_sync.state import ParamSpec
from lightning_sync.testing import make_specs

SHAPES = {"a": (40, 30), "a.bias": (40,), "b": (30, 40), "odd": (37, 31)}
SAVE = "0123456789abcdef-000002"


def reducers(route: Route, nodes: Sequence[int]) -> list[Reducer]:
    """The reducers of all ranks, in two levels if several nodes hold several ranks each."""

    def wire(topology: Topology) -> GroupWire:
        return GroupWire(None, topology, Counters())  # type: ignore[arg-type]

    made = []
    for rank in range(len(nodes)):
        topology = Topology(rank, tuple(nodes))
        levels = 1 < (topology.ranks_per_node or 0) < topology.size
        inner = (wire(topology.intra()), wire(topology.inter())) if levels else (None, None)
        made.append(Reducer(make_specs(SHAPES), route, Wires(wire(topology), *inner)))
    return made


def fill(reducers: Sequence[Reducer], seed: int = 0) -> None:
    """Random values in all state; factors alike on all ranks, padding left at zero."""
    for rank, reducer in enumerate(reducers):
        for state in reducer.states():
            state.declare()
            for kind, arena in state.arenas.items():
                for key in (p.key for p in state.params):
                    where = f"{seed} {kind} {key} {rank if kind in state.undelivered else ''}"
                    generator = torch.Generator().manual_seed(sum(map(ord, where)) * 1009 + rank * (kind != "factor"))
                    tensor = arena.bind([key])
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
                    if kind in state.undelivered:
                        places, real = state.undelivered[kind](state, key).elements()
                        assert len(places) == tensor.numel()
                        tensor[~real] = 0


def rank_states(reducers: Sequence[Reducer], save: str = SAVE) -> list[RankState]:
    """What the ranks would save."""
    counters = Counters(steps=7)
    return [
        RankState(
            save,
            rank,
            counters.state_dict(),
            reducer.state_dict(),
            reducer.covers(),
            buffers={"norm.running_mean": torch.full((3,), float(rank))},
            replica=ReplicaState({"a": torch.ones(3)}, [{"state": {}, "groups": []}]) if rank == 0 else None,
            mode=ModeState(
                {"clock": 3 + rank, "weight": 0.5, "in_flight": None},
                {"anchor": {"a": torch.full((40, 30), 2.0)}, "outer": {"a": torch.ones(3)}},
                {"pushed": {"a": torch.full((3,), float(rank))}},
            ),
            scaler={"scale": 1024.0, "_growth_tracker": 3},
            random=generators_state(torch.device("cpu")),
        )
        for rank, reducer in enumerate(reducers)
    ]


def parameters(specs: Sequence[ParamSpec], compressor: str = "int8") -> dict[str, ParamEntry]:
    return {p.name: ParamEntry(p.shape, dtype_name(p.dtype), compressor) for p in specs}


def save(checkpoint: Path, states: Sequence[RankState], **fields: object) -> Manifest:
    """Write a save as the ranks of a run do."""
    folder = SyncFolder(checkpoint)
    files: dict[str, FileEntry] = {file_name(s.rank): folder.write(s) for s in states}
    specs = make_specs(SHAPES)
    values: dict[str, object] = {
        "save": states[0].save,
        "mode": "strict",
        "world_size": len(states),
        "leaders": (0,) * len(states),
        "nodes": (),
        "step": 7,
        "compressor": "int8",
        "parameters": parameters(specs),
        "ready_order": tuple(p.name for p in reversed(specs)),
        "files": files,
    }
    manifest = Manifest(**{**values, **fields})  # type: ignore[arg-type]
    folder.commit(manifest)
    checkpoint.touch()
    return manifest
