"""Fits that save at an epoch end and go on, and the same fits begun from that checkpoint."""

import logging
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_sync.reducer import Reducer
from lightning_sync.state import canonical_name
from lightning_sync.strategies import SyncStrategy
from tests.models import Toy, everything, fit

EPOCH = 4
"""Steps of an epoch before accumulation."""


class Noisy(Toy):
    """A model that draws from all random generators of the process in every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        noise = random.random() + float(np.random.rand())
        return super().forward(self.drop(x) + 0.01 * noise, extra)

    def batch_weight(self, batch: Any) -> Tensor:
        """Asked for by weighted means only; other in every batch, and other on every rank."""
        return (batch[0][:, 0] > 0).sum() + 1 + self.global_rank


@dataclass
class Seen:
    """What a fit ended with on one rank."""

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    optimizer: list[Tensor]
    losses: list[float]
    steps: int
    wire_bytes: int
    said: list[str] = field(default_factory=list)
    trainer: Any = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}  # a trainer is of use in its own process only


def generators() -> dict[str, Tensor]:
    """Where the process's random generators stand."""
    return {
        "python": torch.tensor(random.getstate()[1]),
        "numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
        "torch": torch.get_rng_state(),
    }


class Peek(Callback):
    """Copies the reducer's state before teardown drops it."""

    state: dict[str, dict[str, Tensor]]
    optimizer: list[Tensor]

    def __init__(self, at_start: Callable[[Any], None]) -> None:
        self.at_start = at_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.at_start(trainer.strategy)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        hook = getattr(trainer.precision_plugin, "hook", None)
        reducer: Reducer | None = getattr(trainer.strategy, "_reducer", None) if hook is None else hook.reducer
        self.state = {} if reducer is None else reducer.state_dict()
        if isinstance(trainer.strategy, SyncStrategy):
            mode = trainer.strategy.mode_state()
            held = {**mode.replicated, **mode.local}
            self.state |= {kind: {n: t.clone() for n, t in tensors.items()} for kind, tensors in held.items()}
        self.state["generators"] = generators()
        states = trainer.optimizers[0].state_dict()["state"]
        self.optimizer = [v.clone() for s in states.values() for v in s.values() if isinstance(v, Tensor)]


class Said(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(
    strategy: SyncStrategy | Any,
    world_size: int,
    *,
    epochs: int,
    folder: Path | None = None,
    resume: Path | None = None,
    seed: int = 3,
    model: dict[str, Any] | None = None,
    noise: bool = True,
    kind: type[Toy] | None = None,
    compiled: str = "no",
    extra: Sequence[Callback] = (),
    at_start: Callable[[Any], None] = lambda strategy: None,
    **trainer: Any,
) -> Seen:
    """Train for `epochs` epochs of `EPOCH` batches; save each epoch's end to `folder`, begin at `resume`.

    `kind` is the module's class; `compiled` is "no", "module" or "layers".
    Without `noise`, nothing is drawn from random generators in a step. `at_start` is called before the first step.
    """
    # Not `seed_everything`: Lightning's sampler takes that seed too, and a run that goes on must keep its data order.
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    module = (kind or (Noisy if noise else Toy))(**(model or {}))
    if compiled == "layers":
        module.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in module.layers)
    given = torch.compile(module, backend="eager") if compiled == "module" else module
    peek = Peek(at_start)
    callbacks: list[Callback] = [peek, *extra]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1))
    said = Said()
    logger = rank_zero.log
    logger.addHandler(said)
    options = {"max_steps": -1, "max_epochs": epochs, "limit_train_batches": EPOCH, "callbacks": callbacks, **trainer}
    if folder is not None:
        options["enable_checkpointing"] = True
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer_used = fit(given, strategy, world_size, ckpt_path=resume, **options)
    finally:
        logger.removeHandler(said)
    said.lines += [str(w.message) for w in warned]
    counters = getattr(strategy, "counters", None)
    return Seen(
        {canonical_name(name): tensor for name, tensor in everything(module).items()},
        peek.state,
        peek.optimizer,
        module.losses,
        counters.steps if counters else 0,
        counters.wire_bytes if counters else 0,
        said.lines,
        trainer_used,
    )


def differences(whole: Seen, resumed: Seen) -> list[str]:
    """Names of what is not the same, bit for bit."""
    found = [f"weight {k}" for k, v in whole.weights.items() if not torch.equal(v, resumed.weights[k])]
    if whole.state.keys() != resumed.state.keys():
        found.append("kinds of state")
    for kind, tensors in whole.state.items():
        other = resumed.state.get(kind, {})
        if tensors.keys() != other.keys():
            found.append(f"names of {kind}")
        found += [f"{kind} {k}" for k, v in tensors.items() if k in other and not torch.equal(v, other[k])]
    if not all(torch.equal(a, b) for a, b in zip(whole.optimizer, resumed.optimizer, strict=True)):
        found.append("optimiser")
    if whole.losses[-len(resumed.losses) :] != resumed.losses:
        found.append("losses")
    if (whole.steps, whole.wire_bytes) != (resumed.steps, resumed.wire_bytes):
        found.append(f"counters {whole.steps, whole.wire_bytes} {resumed.steps, resumed.wire_bytes}")
    return found
