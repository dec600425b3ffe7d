"""Puts the state of the ranks back into a strategy: bit for bit, or what of it other ranks can use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_sync.checkpoint import Manifest, ModeState, RankState, StateFileError, SyncFolder
from lightning_sync.checkpoint.optimizers import fitting, optimizer_state
from lightning_sync.checkpoint.plain import require
from lightning_sync.checkpoint.respread import Gathered
from lightning_sync.checkpoint.rngs import set_generators
from lightning_sync.state import canonical_name

if TYPE_CHECKING:
    from lightning_sync.strategies.base import SyncStrategy


@dataclass
class Found:
    """Sync state found beside the checkpoint that is being loaded, and, once read, what is applied last.

    Attributes:
        folder: Where it lies.
        manifest: What it is.
        checkpoint: The ordinary checkpoint, while Lightning holds it.
        own: This rank's own state, if as many ranks were saved as there are now.
        same: Whether it is taken over bit for bit.
        optimizers: What this replica's optimisers take, if it has its own.
        mode: What the mode takes.
        spread: What is said of another layout, and what starts afresh in it.
    """

    folder: SyncFolder
    manifest: Manifest
    checkpoint: Mapping[str, Any]
    own: RankState | None = None
    same: bool = False
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    mode: ModeState = field(default_factory=ModeState)
    spread: tuple[str, list[str]] | None = None

    def read_own(self, rank: int) -> RankState:
        """Read this rank's own state, once."""
        if self.own is None:
            self.own = self.folder.read(self.manifest, rank)
        return self.own


def take_over(strategy: SyncStrategy, found: Found) -> None:
    """Rank r takes over rank r's state, bit for bit.

    Raises:
        StateFileError: if a file is not as it was written; then nothing of it is used.
    """
    manifest = found.manifest
    module = strategy.lightning_module
    assert module is not None
    own = found.read_own(strategy.global_rank)
    moves = _moves(own.buffers, buffers_of(module, copy=False), "buffer")
    leader = manifest.leaders[strategy.global_rank]
    if set(manifest.leaders) != {0}:
        replica = (own if leader == own.rank else found.folder.read(manifest, leader)).replica
        if replica is None:
            raise StateFileError(f"rank {leader} is the first of its replica, but its file holds no parameters")
        names = {p: canonical_name(name) for name, p in module.named_parameters()}
        moves += _moves(replica.parameters, {name: p for p, name in names.items()}, "parameter")
        require(
            len(replica.optimizers) == len(strategy.optimizers),
            f"{len(replica.optimizers)} optimisers were saved, this run has {len(strategy.optimizers)}",
        )
        found.optimizers = [
            fitting(o, state, names) for o, state in zip(strategy.optimizers, replica.optimizers, strict=True)
        ]
    found.mode = own.mode
    if own.rank and own.mode.replicated:
        found.mode = own.mode.completed(found.folder.read(manifest, 0).mode)
    if strategy._reducer is not None:
        strategy._reducer.load_state_dict(own.tensors)
    with torch.no_grad():
        for target, value in moves:
            target.copy_(value)
    strategy.counters.load_state_dict(own.counters)
    found.same = True


def spread(strategy: SyncStrategy, found: Found, now: Manifest) -> None:
    """Other ranks, mode or compressor: keep what can be kept, and note what starts afresh.

    Raises:
        StateFileError: if a file is not as it was written; then nothing of it is used.
    """
    manifest = found.manifest
    sizes = {name: p.numel for name, p in manifest.parameters.items()}
    local: set[str] = set()
    left_out: set[str] = set()

    def ranks() -> Iterator[RankState]:
        for rank in range(len(manifest.files)):
            state = found.folder.read(manifest, rank)
            local.update(state.mode.local)
            left_out.update(kind for kind, tensors in state.tensors.items() if not tensors)
            if rank == 0:
                found.mode = ModeState(state.mode.numbers, state.mode.replicated)
            yield state

    gathered = Gathered.of(ranks(), sizes)
    lost: list[str] = []
    if strategy._reducer is not None:
        taken, lost = gathered.shares(strategy._reducer)
        strategy._reducer.load_state_dict(taken)
    elif gathered.owed:
        lost = [f"what was owed to {len(gathered.owed)} parameters, since nothing is compressed now"]
    strategy.counters.steps = manifest.step
    changed = [
        f"{name} {before!r} -> {after!r}"
        for name, before, after in (
            ("mode", manifest.mode, now.mode),
            ("ranks", manifest.world_size, now.world_size),
            ("compressor", manifest.compressor, now.compressor),
        )
        if before != after
    ]
    if manifest.local != "all":
        changed.append(f"saved with save_local={manifest.local!r}")
        lost += sorted(left_out)
    if set(manifest.leaders) != {0}:
        lost.append("parameters and optimiser states of every replica but rank 0's")
    if not strategy.takes_state_of(manifest.mode):
        local.update(found.mode.kinds)
        found.mode = ModeState()
    if local:
        lost.append(f"{', '.join(sorted(local))} of mode {manifest.mode!r}")
    lost.append("loss scalers of each rank" if found.own else "random generators and loss scalers of each rank")
    kept = (
        f": what was owed to {len(gathered.owed)} parameters is spread evenly over the ranks" if gathered.owed else ""
    )
    found.spread = (
        f"Resumed at step {manifest.step} in another layout ({', '.join(changed) or 'options differ'}){kept}.",
        lost,
    )


def finish(strategy: SyncStrategy, found: Found) -> None:
    """Put back what Lightning would overwrite: optimisers of this replica, mode, loss scaler, random generators."""
    for optimizer, state in zip(strategy.optimizers, found.optimizers, strict=False):
        optimizer.load_state_dict(state)
    lost = [x for x in strategy.load_mode_state(found.mode, same=found.same) if x] if found.mode else []
    if found.own is not None:
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        if scaler is not None and found.same and found.own.scaler is not None:
            scaler.load_state_dict(found.own.scaler)
        set_generators(found.own.random, strategy.root_device)
    if found.spread is not None:
        text, others = found.spread
        rank_zero_info(f"{text} Afresh start: {'; '.join([*others, *lost])}.")
    elif found.same:
        manifest = found.manifest
        rank_zero_info(
            f"Resumed the state of all {manifest.world_size} ranks at step {manifest.step}, bit for bit"
            + (f", but afresh: {'; '.join(lost)}." if lost else ".")
        )


def as_named_now(values: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """A model's saved state under the names that it has in this run, if only parts of it were compiled since or before.

    `torch.compile` of a layer puts ``_orig_mod.`` into the names of its parameters.
    """
    now = {canonical_name(name): name for name in module.state_dict(keep_vars=True)}
    return {now.get(canonical_name(name), name): value for name, value in values.items()}


def buffers_of(module: nn.Module, *, copy: bool = True) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, by name."""
    kept = {canonical_name(name) for name in module.state_dict(keep_vars=True)}
    named = ((canonical_name(name), b) for name, b in module.named_buffers())
    return {name: b.detach().clone() if copy else b for name, b in named if name in kept}


def replica_optimizers(optimizers: list[torch.optim.Optimizer], module: nn.Module) -> list[dict[str, Any]]:
    """The optimisers' states by parameter name."""
    names = {p: canonical_name(name) for name, p in module.named_parameters()}
    return [optimizer_state(optimizer, names) for optimizer in optimizers]


def _moves(values: Mapping[str, Tensor], targets: Mapping[str, Tensor], what: str) -> list[tuple[Tensor, Tensor]]:
    require(
        set(values) == set(targets),
        f"the saved {what}s are not those of this model: {sorted(set(values) ^ set(targets))}",
    )
    for name, value in values.items():
        require(
            value.shape == targets[name].shape and value.dtype == targets[name].dtype,
            f"{what} {name!r} was saved as {tuple(value.shape)} {value.dtype}",
        )
    return [(targets[name], value) for name, value in values.items()]
