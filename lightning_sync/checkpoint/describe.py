"""What lies in a folder of state files, in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lightning_sync.checkpoint.folder import SyncFolder
from lightning_sync.checkpoint.manifest import Manifest, file_name
from lightning_sync.checkpoint.plain import StateFileError
from lightning_sync.checkpoint.rank_state import RankState


def describe(path: str | Path) -> str:
    """Describe the state that belongs to a checkpoint, after checking all of it.

    Args:
        path: The checkpoint, or the folder ``<checkpoint>.sync`` beside it.

    Raises:
        StateFileError: if there is none, or any file is not as it was written.
    """
    path = Path(path)
    checkpoint = str(path).removesuffix(".sync")
    for folder in (SyncFolder(checkpoint), SyncFolder(Path(checkpoint).resolve())):
        saves = folder.saves()
        if saves:
            return "\n\n".join(_save(folder, save) for save in saves)
    raise StateFileError(f"{SyncFolder(checkpoint).path} holds no complete save of the ranks' state.")


def _save(folder: SyncFolder, save: str) -> str:
    manifest = folder.manifest(save)
    elements = sum(p.numel for p in manifest.parameters.values())
    size = sum(f.size for f in manifest.files.values())
    lines = [
        f"save        {save} in {folder.path}",
        f"mode        {manifest.mode}, compressor {manifest.compressor}",
        f"step        {manifest.step}",
        f"ranks       {manifest.world_size}{_replicas(manifest)}{_nodes(manifest)}",
        f"parameters  {len(manifest.parameters)}, {elements:,} elements",
        f"buckets     {'order of parameters saved' if manifest.ready_order else 'no order to keep'}",
        f"files       {len(manifest.files)}, {size:,} bytes, all as they were written{_local(manifest)}",
    ]
    for rank in range(len(manifest.files)):
        lines += _rank(folder.read(manifest, rank), manifest.files[file_name(rank)].size)
    return "\n".join(lines)


def _replicas(manifest: Manifest) -> str:
    different = len(set(manifest.leaders))
    return f", {different} replicas that differ" if different > 1 else ""


def _local(manifest: Manifest) -> str:
    return "" if manifest.local == "all" else ": save_local='consensus', what differs by rank is left out"


def _nodes(manifest: Manifest) -> str:
    return f" on {len(set(manifest.nodes))} nodes, reduced in two levels" if manifest.nodes else ""


def _rank(state: RankState, size: int) -> list[str]:
    lines = [f"rank {state.rank}: {size:,} bytes"]
    lines += [_tensors(kind, tensors, "parameters") for kind, tensors in sorted(state.tensors.items()) if tensors]
    if state.buffers:
        lines.append(f"  {'buffers':<16} {len(state.buffers)}")
    if state.replica is not None:
        n = len(state.replica.optimizers)
        lines.append(f"  {'replica':<16} {len(state.replica.parameters)} parameters, {n} optimisers")
    if state.mode.numbers:
        lines.append(f"  {'mode':<16} {', '.join(f'{k} {v!r}' for k, v in sorted(state.mode.numbers.items()))}")
    for held, where in ((state.mode.replicated, "tensors, alike on all ranks"), (state.mode.local, "tensors")):
        lines += [_tensors(kind, tensors, where) for kind, tensors in sorted(held.items()) if tensors]
    if state.loaders:
        lines.append(f"  {'loaders':<16} {len(state.loaders)} stateful")
    if state.scaler is not None:
        lines.append(f"  {'loss scaler':<16} scale {state.scaler.get('scale')}")
    present = ", ".join(name for name, value in state.random.items() if value is not None)
    lines.append(f"  {'generators':<16} {present or 'none'}")
    return lines


def _tensors(kind: str, tensors: Mapping[str, Tensor], what: str) -> str:
    elements = sum(t.numel() for t in tensors.values())
    norm = sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5
    return f"  {kind:<16} {len(tensors)} {what}, {elements:,} elements, norm {norm:.6g}"
