"""WirePrecision: the wire format as part of the precision plugin, and loss scaling that compression cannot hide."""

import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy

import lightning_sync as ls
from tests.models import Toy, everything, fit
from tests.workers import run_ranks


class Poisoned(Toy):
    """One inf in one gradient of rank 1 in batch 5; remembers scale and compressor state around that step."""

    def __init__(self, strategy_state: Any) -> None:
        super().__init__()
        self.state_of = strategy_state
        self.seen: list[tuple[float, dict[str, dict[str, torch.Tensor]]]] = []
        self.layers[0].weight.register_hook(self.poison)

    def poison(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.global_rank == 1 and self._batch == 5:
            gradient = gradient.clone()
            gradient[0, 0] = float("inf")
        return gradient

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._batch = batch_idx
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((self.trainer.precision_plugin.scaler.get_scale(), self.state_of(self.trainer)))
        self.weights_after = [*getattr(self, "weights_after", []), everything(self)["last.weight"]]


def _reducer_state(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    strategy = trainer.strategy
    hook = trainer.precision_plugin.hook if type(strategy) is DDPStrategy else strategy._hook
    return hook.reducer.state_dict()


def overflow(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for name, compressor in {"int8": "int8", "powersgd": ls.PowerSGD(rank=1, warmup_steps=2), "bf16": "bf16"}.items():
        for stock in (False, True):
            torch.manual_seed(0)
            plugin = ls.WirePrecision(
                "16-mixed", compressor=compressor, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)
            )
            kind = DDPStrategy if stock else ls.StrictStrategy
            module = Poisoned(_reducer_state)
            fit(module, kind(bucket_cap_mb=0.005), world_size, max_steps=9, plugins=[plugin])
            scales = [s for s, _ in module.seen]
            before, after = module.seen[4][1], module.seen[5][1]
            frozen = all(torch.equal(v, after[k][n]) for k, part in before.items() for n, v in part.items())
            moved = not torch.equal(module.weights_after[5], module.weights_after[6])
            skipped = torch.equal(module.weights_after[4], module.weights_after[5])
            results[f"{name}, {kind.__name__}"] = (scales, frozen, skipped, moved, everything(module)["last.weight"])
    return results


@pytest.mark.dist
def test_an_overflow_on_one_rank_skips_the_step_everywhere_and_touches_no_state() -> None:
    ranks = run_ranks(overflow, 2, init="env", deadline=150)
    for name, (scales, frozen, skipped, moved, weight) in ranks[0].items():
        assert scales == [1024.0] * 5 + [512.0] * 4, name
        assert frozen, f"{name}: residuals and factors must stay bitwise what they were"
        assert skipped, name
        assert moved, f"{name}: training goes on"
        assert ranks[1][name][0] == scales
        assert torch.equal(weight, ranks[1][name][4]), name


def under_stock_ddp(rank: int, world_size: int) -> dict[str, Any]:
    results = {}
    for name, strategy in {
        "stock": DDPStrategy(bucket_cap_mb=0.005),
        "strict": ls.StrictStrategy(bucket_cap_mb=0.005),
    }.items():
        torch.manual_seed(0)
        module = Toy()
        plugin = ls.WirePrecision("bf16-mixed", compressor=ls.PowerSGD(rank=2, warmup_steps=1))
        fit(module, strategy, world_size, max_steps=6, plugins=[plugin])
        counters = plugin.counters if name == "stock" else strategy.counters
        results[name] = (everything(module), counters.wire_bytes, counters.steps)
    return results


@pytest.mark.dist
def test_the_plugin_works_under_lightnings_own_ddp_strategy() -> None:
    ranks = run_ranks(under_stock_ddp, 2, init="env", deadline=90)
    stock, strict = ranks[0]["stock"], ranks[0]["strict"]
    assert stock[1:] == strict[1:]
    assert stock[2] == 6
    for key, value in stock[0].items():
        assert torch.equal(value, strict[0][key]), key


def reused(rank: int, world_size: int) -> list[int]:
    plugin = ls.WirePrecision("32-true", compressor="bf16")
    fit(Toy(), ls.StrictStrategy(), world_size, max_steps=2, plugins=[plugin])
    fit(Toy(), "ddp", world_size, max_steps=3, plugins=[plugin])
    return [plugin.counters.steps, plugin.counters.wire_bytes]


@pytest.mark.dist
def test_a_plugin_that_served_a_strategy_can_serve_ddp_afterwards() -> None:
    for steps, sent in run_ranks(reused, 2, init="env", deadline=90):
        assert steps == 3
        assert sent > 0


def test_on_one_device_it_is_bypassed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning_sync"):
        fit(Toy(), "auto", 1, max_steps=2, plugins=[ls.WirePrecision("32-true", compressor="int8")])
    assert "bypassed" in caplog.text


@pytest.mark.parametrize(
    ("precision", "stock"), [("bf16-mixed", MixedPrecision), ("16-mixed", MixedPrecision), ("32-true", Precision)]
)
def test_it_is_the_stock_plugin_and_files_its_state_under_the_stock_name(precision: Any, stock: type) -> None:
    plugin = ls.WirePrecision(precision, compressor="int8")
    assert isinstance(plugin, stock)
    assert isinstance(plugin, ls.WirePrecision)
    assert type(plugin).__qualname__ == stock.__qualname__
    assert isinstance(pickle.loads(pickle.dumps(plugin)), ls.WirePrecision)


def test_a_compressor_given_twice_is_refused() -> None:
    plugin = ls.WirePrecision("32-true", compressor="int8")
    with pytest.raises(ValueError, match="compressor is given twice"):
        Trainer(accelerator="cpu", strategy=ls.StrictStrategy(compressor="bf16"), plugins=[plugin])


def test_a_precision_flag_beside_a_plugin_inside_the_strategy_is_refused() -> None:
    strategy = ls.StrictStrategy(precision_plugin=ls.WirePrecision("32-true", compressor="int8"))
    with pytest.raises(ValueError, match=r"precision='bf16-mixed'.*ignored"):
        fit(Toy(), strategy, 1, precision="bf16-mixed")


@pytest.mark.parametrize("arguments", [("8-mixed",), ("bf16-mixed", "in8")])
def test_wrong_values_name_what_is_accepted(arguments: Any) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        ls.WirePrecision(*arguments)
