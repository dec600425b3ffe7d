"""Ranks that must be equal and are not: seen within the period, named on every rank; and no alarm where all is well."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import lightning_sync as ls
from lightning_sync.comm.failure import RemoteFailure
from lightning_sync.drift import DriftAlarm
from tests.models import Toy, everything, fit
from tests.workers import launch_ranks, run_ranks

EVERY, WHEN = 3, 5


class ByHand(Toy):
    """Two optimisers, two backwards per batch, each optimiser with half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward((self(x) - y).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.AdamW(part, lr=0.01) for part in (parameters[::2], parameters[1::2])]


class Compared(Callback):
    """Counts comparisons."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        alarm = trainer.strategy._alarms._drift
        assert isinstance(alarm, DriftAlarm)
        begin = alarm.begin

        def counted(step: int) -> None:
            self.steps.append(step)
            begin(step)

        alarm.begin = counted


QUIET: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "none": (Toy, lambda **o: ls.StrictStrategy(**o), {}),
    "no buffers sent": (Toy, lambda **o: ls.StrictStrategy(forward_sync_buffers=False, **o), {}),
    "int8": (lambda: Toy(adam=True), lambda **o: ls.StrictStrategy(compressor="int8", **o), {}),
    "powersgd, accumulate": (
        Toy,
        lambda **o: ls.StrictStrategy(compressor=ls.PowerSGD(rank=1, warmup_steps=1), **o),
        {"accumulate_grad_batches": 2},
    ),
    "unused": (lambda: Toy(alternate=True), lambda **o: ls.StrictStrategy(find_unused_parameters=True, **o), {}),
    "static": (Toy, lambda **o: ls.StrictStrategy(compressor="int8", static_graph=True, **o), {}),
    "scaled": (Toy, lambda **o: ls.StrictStrategy(compressor="bf16", **o), {"precision": "16-mixed"}),
    "by hand": (ByHand, lambda **o: ls.StrictStrategy(**o), {}),
    "replica": (Toy, lambda **o: ls.UnwrappedStrategy(replica=3, **o), {"accumulate_grad_batches": 2}),
    "delayed": (Toy, lambda **o: ls.DelayedStrategy(**o), {}),
    "hybrid": (Toy, lambda **o: ls.HybridStrategy(replica=3, sync_every=2, **o), {}),
}


def quiet(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    for name, (make, strategy, options) in QUIET.items():
        torch.manual_seed(0)
        compared = Compared()
        steps = 12 if name == "by hand" else 6
        fit(make(), strategy(drift_check_every=1), world_size, max_steps=steps, callbacks=[compared], **options)
        results[name] = compared.steps
    for replica in (None, 3):
        made = [
            ls.StrictStrategy(drift_check_every=2, compressor="int8")
            if replica is None
            else ls.UnwrappedStrategy(replica=3, drift_check_every=2)
            for _ in range(2)
        ]
        path = Path(folder) / f"{replica}.ckpt"
        trainer = fit(Saving(path), made[0], world_size, max_steps=5)
        compared = Compared()
        fit(Toy(), made[1], world_size, max_steps=9, ckpt_path=path, callbacks=[compared])
        results[f"resumed, {replica}"] = compared.steps
        assert trainer.global_step == 5
    return results


class Saving(Toy):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_equal_replicas_raise_no_alarm(tmp_path: Path) -> None:
    for results in run_ranks(quiet, 3, str(tmp_path), init="env", deadline=170):
        for name, steps in results.items():
            # The last step has no batch after it.
            assert steps == ([6, 8] if name.startswith("resumed") else [1, 2, 3, 4, 5]), name


class Corrupting(Toy):
    """One element of one tensor of rank 1 gets other bits before batch 5, in its lowest bit."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == WHEN:
            self.get_parameter_or_buffer().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)

    def get_parameter_or_buffer(self) -> Tensor:
        return dict([*self.named_parameters(), *self.named_buffers()])[self.what].data


DRIFTING: dict[str, tuple[str, Any]] = {
    "none": ("layers.1.weight", lambda **o: ls.StrictStrategy(**o)),
    "int8": ("frozen", lambda **o: ls.StrictStrategy(compressor="int8", **o)),
    "replica": ("norm.bias", lambda **o: ls.UnwrappedStrategy(replica=3, **o)),
    "at the end": ("last.bias", lambda **o: ls.StrictStrategy(**o)),
}


def drifting(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for name, (what, strategy) in DRIFTING.items():
        torch.manual_seed(0)
        module = Corrupting(what)
        every, steps = (WHEN, WHEN + 1) if name == "at the end" else (EVERY, 400)
        try:
            fit(module, strategy(drift_check_every=every), world_size, max_steps=steps)
            results[name] = None
        except (ls.DriftError, RemoteFailure) as error:
            results[name] = (type(error).__name__, str(error), len(module.losses))
    torch.manual_seed(0)
    module = Corrupting("norm.running_mean")
    fit(module, ls.StrictStrategy(drift_check_every=1), world_size, max_steps=8)
    return {**results, "buffer": everything(module)["last.weight"]}


@pytest.mark.dist
def test_one_bit_on_one_rank_ends_the_run_on_all_and_is_named() -> None:
    ranks = [outcome.result for outcome in launch_ranks(drifting, 3, init="env", deadline=170)]
    repaired = [results.pop("buffer") for results in ranks]
    assert all(torch.equal(weights, repaired[0]) for weights in repaired), (
        "DDP itself repairs buffers before it uses them"
    )
    for results in ranks:
        for name, found in results.items():
            assert found is not None, name
            kind, text, batches = found
            assert kind == "DriftError", (name, text)
            assert repr(DRIFTING[name][0]) in text, text
            assert "rank 1 holds other bits" in text, text
            assert batches <= WHEN + EVERY + 1, name


def test_it_can_be_turned_off_and_its_period_is_checked() -> None:
    with pytest.raises(ValueError, match=r"drift_check_every=-1.*at least 0"):
        ls.StrictStrategy(drift_check_every=-1)
    with pytest.raises(ValueError, match=r"drift_check_every=True"):
        ls.StrictStrategy(drift_check_every=True)
