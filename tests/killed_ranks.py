"""What the ranks of `tests.kills` run: small models and compressors that mark the moments at which ranks are killed."""

import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_sync as ls
from lightning_sync.checkpoint import SyncFolder
from lightning_sync.comm.worker import ThreadExecutor
from tests.models import Toy, fit

RANKS = 3
STEP_TIMEOUT = 10.0  # in trials with SIGSTOP
MOMENTS = {
    "strict": ("compute", "collective", "saving"),
    "strict, int8": ("compute", "encode", "collective", "saving"),
    "un-wrapped, one replica": ("compute", "collective", "saving"),
    "un-wrapped, alone": ("compute", "saving"),
}
# Chosen by `--periodic`, so that seeds of the modes above keep meaning what they meant.
PERIODIC = {
    "local SGD, int8": ("compute", "encode", "collective", "saving"),
    "DiLoCo, overlapped": ("compute", "collective", "saving"),
    "delayed": ("compute", "collective", "saving"),
}


@dataclass(frozen=True)
class Plan:
    """What happens in one trial."""

    seed: int
    sign: signal.Signals
    mode: str
    victim: int
    moment: str
    step: int
    delay: float

    @classmethod
    def draw(cls, seed: int, sign: signal.Signals, modes: dict[str, tuple[str, ...]] | None = None) -> "Plan":
        dice = random.Random(seed)
        modes = modes or MOMENTS
        mode = dice.choice(list(modes))
        moment = dice.choice(modes[mode])
        return cls(seed, sign, mode, dice.choice([1, 2]), moment, dice.randint(2, 20), dice.random() * 0.04)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.sign.name} to rank {self.victim} of {self.mode!r}, in {self.moment} from step "
            f"{self.step} on, {1000 * self.delay:.0f} ms after"
        )


class Marks:
    """Tells the process that kills that the moment has come (on the victim only)."""

    def __init__(self, plan: Plan, rank: int, folder: Path) -> None:
        self.file = folder / "ready" if rank == plan.victim else None
        self.moment, self.after = plan.moment, plan.step
        self.step = 0

    def __call__(self, moment: str) -> None:
        if self.file is not None and moment == self.moment and self.step >= self.after:
            self.file.touch()
            self.file = None


class Marked(Toy):
    """Marks the beginnings of compute and, for what happens in C++, of the collectives."""

    marks: Marks

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.marks.step = self.trainer.global_step
        self.marks("compute")
        # Those who are not killed come late, so that the victim waits for them in its collectives.
        time.sleep(0.01 if self.marks.file else 0.03)
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        if isinstance(self.trainer.strategy, ls.StrictStrategy) and self.trainer.strategy.is_stock:
            self.marks("collective")


class MarkedInt8(ls.BlockInt8):
    """Marks the beginning of encoding."""

    def encode_planes(self, values: Any, keys: Any) -> Any:
        _mark_now("encode")
        return super().encode_planes(values, keys)


_mark_now: Callable[[str], None] = lambda moment: None  # noqa: E731


def strategy(mode: str, **options: Any) -> Any:
    if mode == "strict":
        return ls.StrictStrategy(bucket_cap_mb=0.005, **options)
    if mode == "strict, int8":
        return ls.StrictStrategy(bucket_cap_mb=0.005, compressor=MarkedInt8(), **options)
    if mode == "local SGD, int8":
        return ls.strategy("local_sgd", sync_every=4, compressor=MarkedInt8(), **options)
    if mode == "DiLoCo, overlapped":
        return ls.strategy("diloco", sync_every=5, overlap_steps=2, warmup_steps=2, **options)
    if mode == "delayed":
        return ls.strategy("delayed", **options)
    return ls.UnwrappedStrategy(replica=RANKS if mode == "un-wrapped, one replica" else "rank", **options)


def train(rank: int, plan: Plan, folder: Path, resume: Path | None, steps: int = 100_000) -> None:
    """What every rank of a trial runs; with `resume`, two steps from that checkpoint on."""
    global _mark_now
    torch.manual_seed(0)
    module = Marked()
    module.marks = _mark_now = Marks(plan, rank, folder)
    wait, write = ThreadExecutor.wait, SyncFolder.write

    def marked_wait(self: Any, work: Any) -> None:
        module.marks("collective")
        wait(self, work)

    def marked_write(self: Any, state: Any) -> Any:
        module.marks("saving")
        time.sleep(0.02)
        return write(self, state)

    options = {} if plan.sign == signal.SIGKILL else {"step_timeout": STEP_TIMEOUT}
    callbacks = [ModelCheckpoint(folder / "saved", every_n_train_steps=3, save_top_k=-1, filename="{step}")]
    with ExitStack() as patches:
        if resume is None:
            patches.enter_context(patch.object(ThreadExecutor, "wait", marked_wait))
            patches.enter_context(patch.object(SyncFolder, "write", marked_write))
        else:
            steps = 2 + int(str(resume.stem).rpartition("=")[2])
        trainer = fit(
            module,
            strategy(plan.mode, stacks_dir=folder / "stacks", **options),
            RANKS,
            max_steps=steps,
            ckpt_path=resume,
            callbacks=callbacks if resume is None else [],
            enable_checkpointing=resume is None,
        )
    print(f"went on to step {trainer.global_step}", flush=True)
