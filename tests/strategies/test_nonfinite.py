"""A gradient with inf or NaN on one rank: all ranks skip the step, or all end and say whose it was."""

import logging
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_sync as ls
from lightning_sync.comm.failure import RemoteFailure
from tests.models import Toy, everything, fit
from tests.workers import launch_ranks, run_ranks

BAD = 5


class Poisoned(Toy):
    """One NaN in one gradient of the last rank in batch 5, or from then on; remembers what every batch left behind."""

    def __init__(self, always: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.always = always
        self.weights: list[dict[str, Tensor]] = []
        self.optimizer_states: list[list[Tensor]] = []
        self.states: list[dict[str, dict[str, Tensor]]] = []
        self.layers[0].weight.register_hook(self.poison)

    def poison(self, gradient: Tensor) -> Tensor:
        hit = self._batch >= BAD if self.always else self._batch == BAD
        if self.global_rank == self.trainer.world_size - 1 and hit:
            gradient = gradient.clone()
            gradient[0, 0] = float("nan")
        return gradient

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._batch = len(self.weights)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.weights.append({n: p.detach().clone() for n, p in self.named_parameters()})
        state = self.optimizers().state.values()
        self.optimizer_states.append([t.clone() for s in state for t in s.values() if isinstance(t, Tensor)])
        reducer = getattr(self.trainer.strategy, "_reducer", None)
        hook = getattr(self.trainer.precision_plugin, "hook", None)
        reducer = hook.reducer if hook is not None else reducer
        self.states.append({} if reducer is None else reducer.state_dict())


class ByHand(Poisoned):
    """Manual optimisation with two optimisers and two backwards per batch; the first is the bad one."""

    def __init__(self) -> None:
        super().__init__(alternate=False)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self._batch = len(self.weights)
        x, y = batch
        for i, optimizer in enumerate(self.optimizers()):
            if i:
                self._batch = -1
            optimizer.zero_grad()
            self.manual_backward((self(x) - y).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        parts = [[p for n, p in named.items() if n.startswith("layers") == first] for first in (True, False)]
        return [torch.optim.AdamW(part, lr=0.01) for part in parts]

    def on_train_batch_end(self, *args: Any) -> None:
        self.weights.append({n: p.detach().clone() for n, p in self.named_parameters()})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


SKIPPING: dict[str, Any] = {
    "int8": lambda: ls.StrictStrategy(compressor="int8", bucket_cap_mb=0.005, non_finite="skip"),
    "powersgd, views": lambda: ls.StrictStrategy(
        compressor=ls.PowerSGD(rank=1, warmup_steps=2),
        bucket_cap_mb=0.005,
        gradient_as_bucket_view=True,
        non_finite="skip",
    ),
    "bf16, static graph": lambda: ls.StrictStrategy(compressor="bf16", static_graph=True, non_finite="skip"),
    "none": lambda: ls.StrictStrategy(non_finite="skip", gradient_as_bucket_view=True),
    "replica": lambda: ls.UnwrappedStrategy(replica=2, non_finite="skip"),
    "plugin": lambda: DDPStrategy(bucket_cap_mb=0.005),
}


def skip(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    heard = Heard()
    logging.getLogger("lightning_sync").addHandler(heard)
    for name, make in SKIPPING.items():
        for adam in (False, True):
            heard.texts.clear()
            torch.manual_seed(0)
            module, strategy = Poisoned(adam=adam), make()
            plugin = ls.WirePrecision("32-true", compressor="int8", non_finite="skip") if name == "plugin" else None
            fit(module, strategy, world_size, max_steps=9, plugins=[plugin] if plugin else None)
            counters = strategy.counters if plugin is None else plugin.counters
            results[f"{name}, {'AdamW' if adam else 'SGD'}"] = {
                "held": [
                    same(kind[BAD - 1], kind[BAD]) for kind in (module.weights, module.optimizer_states, module.states)
                ],
                "moves": [not same(module.weights[i], module.weights[i + 1]) for i in (BAD - 2, BAD, BAD + 1)],
                "counts": (counters.skipped_steps, counters.steps),
                "final": everything(module)["last.weight"],
                "warned": [t for t in heard.texts if "skipped" in t],
            }
    torch.manual_seed(0)
    module = ByHand()
    strategy = ls.StrictStrategy(compressor="int8", bucket_cap_mb=0.005, non_finite="skip")
    fit(module, strategy, world_size, max_steps=16)
    first, second = (
        [n for n in module.weights[0] if n.startswith("layers") == layers and "frozen" not in n and "some" not in n]
        for layers in (True, False)
    )
    before, after = module.weights[BAD - 1], module.weights[BAD]
    results["by hand"] = (
        all(torch.equal(before[n], after[n]) for n in first),
        any(not torch.equal(before[n], after[n]) for n in second),
        strategy.counters.skipped_steps,
        module.weights[-1]["last.weight"],
    )
    return results


@pytest.mark.dist
def test_a_skipped_step_changes_nothing_on_any_rank() -> None:
    ranks = run_ranks(skip, 2, init="env", deadline=170)
    for rank, results in enumerate(ranks):
        held, moved, count, final = results.pop("by hand")
        assert held
        assert moved, "the second backward of that batch was sound, and its optimiser steps"
        assert count == 1
        assert torch.equal(final, ranks[0].get("final by hand", final))
        ranks[0].setdefault("final by hand", final)
        for name in (n for n in results if n != "final by hand"):
            result = results[name]
            assert result["held"] == [True] * 3, f"{name}: weights, optimiser, compressor"
            assert result["moves"] == [True] * 3, name
            assert result["counts"] == (1, 9), name
            assert torch.equal(result["final"], ranks[0][name]["final"]), name
            assert len(result["warned"]) == (rank == 0), (name, rank, result["warned"])
        if rank == 0:
            assert "'layers.0.weight' holds inf or NaN on rank 1" in results["int8, SGD"]["warned"][0]
            assert "averaged gradient of 'layers.0.weight'" in results["none, SGD"]["warned"][0]


RAISING: dict[str, Any] = {
    "int8": lambda: ls.StrictStrategy(compressor="int8", bucket_cap_mb=0.005),
    "int8, accumulate": lambda: ls.StrictStrategy(compressor="int8", bucket_cap_mb=0.005),
    "none": lambda: ls.StrictStrategy(non_finite="raise"),
    "replica": lambda: ls.UnwrappedStrategy(replica=3, non_finite="raise"),
    "only skipping": lambda: ls.StrictStrategy(compressor="bf16", non_finite="skip"),
}


def end(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for name, make in RAISING.items():
        torch.manual_seed(0)
        module = Poisoned(always=name == "only skipping")
        options = {"accumulate_grad_batches": 2} if "accumulate" in name else {}
        start = time.monotonic()
        try:
            fit(module, make(), world_size, max_steps=400, **options)
            error: Any = None
        except (ls.NonFiniteError, RemoteFailure) as caught:
            error = (type(caught).__name__, str(caught))
        final = {n: p.detach() for n, p in module.named_parameters()}
        results[name] = (error, same(final, module.weights[-1]), len(module.weights), time.monotonic() - start)
    return results


@pytest.mark.dist
def test_a_run_that_raises_ends_on_all_ranks_before_any_optimiser_has_moved() -> None:
    # A process whose communication thread hangs in a collective may end badly afterwards; here it is caught too late.
    ranks = [outcome.result for outcome in launch_ranks(end, 3, init="env", deadline=170)]
    for rank, results in enumerate(ranks):
        for name, (error, unmoved, batches, seconds) in results.items():
            assert error is not None, (name, rank)
            assert "'layers.0.weight' holds inf or NaN" in error[1], (name, rank, error)
            assert unmoved, (name, rank)
            if name == "only skipping":
                assert batches == BAD + 100 - 1
                continue
            assert batches == BAD, (name, rank)
            assert seconds < 20, (name, rank)
            if name.startswith("int8"):
                assert error[0] == ("NonFiniteError" if rank == 2 else "RemoteFailure"), (name, rank, error)
                assert "on rank 2" in error[1]
                assert "rank 2" in error[1]


@pytest.mark.parametrize("value", ["skp", True, 1])
def test_other_values_are_refused(value: Any) -> None:
    for make in (ls.StrictStrategy, lambda **o: ls.WirePrecision("32-true", **o)):
        with pytest.raises(ValueError, match="expected 'skip', 'raise' or None"):
            make(non_finite=value)


class WithLBFGS(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="LBFGS: it takes gradients that are None for zeros"):
        fit(WithLBFGS(), ls.StrictStrategy(non_finite="skip"), 1, max_steps=2)
    plugin = ls.WirePrecision("32-true", compressor="int8", non_finite="skip")
    with pytest.raises(ValueError, match="non_finite is given twice"):
        fit(Toy(), ls.StrictStrategy(non_finite="skip"), 1, max_steps=1, plugins=[plugin])


@pytest.mark.dist
def test_what_cannot_be_skipped_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="does not go with ddp_comm_hook"):
        ls.StrictStrategy(non_finite="skip", ddp_comm_hook=lambda state, bucket: None)
    run_ranks(refused, 1, init="env")


def alone(rank: int, world_size: int) -> None:
    module: LightningModule = Poisoned()
    with pytest.raises(ls.NonFiniteError, match=r"step 5.*'layers.0.weight'"):
        fit(module, ls.UnwrappedStrategy(non_finite="raise"), 1, max_steps=9)


@pytest.mark.dist
def test_one_rank_alone_raises_if_asked_to() -> None:
    run_ranks(alone, 1, init="env")


REPLICAS: dict[str, Any] = {
    "skip": lambda: ls.UnwrappedStrategy(replica="rank", non_finite="skip"),
    "exchange": lambda: ls.strategy("local_sgd", sync_every=2, replica="rank"),
}


def in_one_replica(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    heard = Heard()
    logging.getLogger("lightning_sync").addHandler(heard)
    for name, make in REPLICAS.items():
        torch.manual_seed(0)
        heard.texts.clear()
        error = ""
        try:
            fit(Poisoned(), make(), world_size, max_steps=9)
        except (ls.NonFiniteError, RemoteFailure) as caught:
            error = str(caught)
        results[name] = [t for t in heard.texts if "skipped" in t], error
    return results


@pytest.mark.dist
def test_where_replicas_differ_messages_say_whose_step_or_parameters_it_was() -> None:
    ranks = [outcome.result for outcome in launch_ranks(in_one_replica, 2, init="env", deadline=60)]
    assert [len(r["skip"][0]) for r in ranks] == [0, 1]
    assert "skipped on ranks [1]: the averaged gradient of 'layers.0.weight'" in ranks[1]["skip"][0][0]
    for r in ranks:
        assert "the distance from the anchor of" in r["exchange"][1]
        assert "holds inf or NaN on rank 1" in r["exchange"][1]
