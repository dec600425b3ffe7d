"""Every way in which an unmodified module can be given a mode: by name, by object, LightningCLI, plugin, compiled."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, StrategyRegistry

import lightning_sync as ls
from lightning_sync.strategies import NAMES
from tests.models import Toy, everything, fit
from tests.workers import run_ranks


class Quiet(Toy):
    """Logs nothing: torch 2.13 cannot compile through Lightning 2.6.6's `self.log`, under any strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y)


TRAINER = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_steps=2",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.limit_val_batches=0",
]


def ways(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def train(name: str, strategy: Any, compiled: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        module: Any = Quiet()
        trained = torch.compile(module, backend="eager") if compiled else module
        trainer = fit(trained, strategy, world_size, max_steps=4, **options)
        results[name] = (type(trainer.strategy).__name__, everything(module))

    train("ddp", "ddp")
    train("by name", "strict")
    train("by name with options", ls.strategy("strict", compressor="bf16", bucket_cap_mb=5))
    train("compiled", "strict", compiled=True)
    train("compiled, compressed", ls.strategy("strict", compressor="bf16", bucket_cap_mb=5), compiled=True)
    plugin = ls.WirePrecision("bf16-mixed", compressor=ls.PowerSGD(rank=2))
    train("plugin under ddp", "ddp", plugins=[plugin])
    results["plugin sent"] = plugin.counters.wire_bytes
    return results


@pytest.mark.dist
def test_by_name_by_object_as_plugin_and_compiled() -> None:
    for result in run_ranks(ways, 2, init="env", deadline=120):
        assert result["by name"][0] == "StrictStrategy"
        assert result["plugin under ddp"][0] == "DDPStrategy"
        assert result["plugin sent"] > 0
        for same in (("by name", "ddp"), ("compiled", "by name"), ("compiled, compressed", "by name with options")):
            first, second = (result[name][1] for name in same)
            assert all(torch.equal(first[k], second[k]) for k in first), same


def cli(rank: int, world_size: int, arguments: list[str]) -> dict[str, Any]:
    sys.argv = ["train.py"]
    run = LightningCLI(Toy, args=["fit", *TRAINER, *arguments], save_config_callback=None)
    assert isinstance(run.trainer.strategy, ls.StrictStrategy)
    return {**run.trainer.strategy.describe(), "buckets": run.trainer.strategy._ddp_kwargs.get("bucket_cap_mb")}


@pytest.mark.dist
def test_lightning_cli_by_name() -> None:
    (described,) = run_ranks(cli, 1, ["--trainer.strategy=strict"], init="env")
    assert described["compressor"] == "none"


@pytest.mark.dist
def test_lightning_cli_by_class_path() -> None:
    arguments = [
        "--trainer.strategy=lightning_sync.StrictStrategy",
        "--trainer.strategy.compressor=lightning_sync.PowerSGD",
        "--trainer.strategy.compressor.rank=2",
        "--trainer.strategy.bucket_cap_mb=5",
    ]
    (described,) = run_ranks(cli, 1, arguments, init="env")
    assert (described["compressor"], described["buckets"]) == ("powersgd", 5)


def cli_aggregator(rank: int, world_size: int, arguments: list[str]) -> str:
    sys.argv = ["train.py"]
    run = LightningCLI(Toy, args=["fit", *TRAINER, *arguments], save_config_callback=None)
    strategy = run.trainer.strategy
    assert isinstance(strategy, ls.StrictStrategy)
    return repr(strategy.aggregator)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.strategy.aggregator=median"], "Median()"),
        (
            [
                "--trainer.strategy.aggregator=lightning_sync.TrimmedMean",
                "--trainer.strategy.aggregator.fraction=0.3",
            ],
            "TrimmedMean(fraction=0.3)",
        ),
    ],
    ids=["by name", "by class path"],
)
def test_lightning_cli_with_an_aggregator(arguments: list[str], expected: str) -> None:
    strategy = ["--trainer.strategy=lightning_sync.StrictStrategy"]
    assert run_ranks(cli_aggregator, 1, strategy + arguments, init="env") == [expected]


def cli_hybrid(rank: int, world_size: int, arguments: list[str]) -> list[str]:
    sys.argv = ["train.py"]
    run = LightningCLI(Toy, args=["fit", *TRAINER, *arguments], save_config_callback=None)
    strategy = run.trainer.strategy
    assert isinstance(strategy, ls.HybridStrategy)
    return [repr(strategy.period), repr(strategy.outer_optimizer), repr(strategy.fragments)]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.strategy=diloco"], ["Every(steps=64)", "Nesterov(lr=0.7, momentum=0.9)", "1"]),
        (
            [
                "--trainer.strategy=lightning_sync.HybridStrategy",
                "--trainer.strategy.sync_every=4",
                "--trainer.strategy.outer_optimizer=lightning_sync.SlowMo",
                "--trainer.strategy.outer_optimizer.momentum=0.4",
            ],
            ["Every(steps=4)", "SlowMo(lr=1.0, momentum=0.4)", "1"],
        ),
        (
            [
                "--trainer.strategy=lightning_sync.HybridStrategy",
                "--trainer.strategy.sync_every=lightning_sync.Growing",
                "--trainer.strategy.sync_every.start=2",
                "--trainer.strategy.fragments=[['*']]",
            ],
            ["Growing(start=2, factor=2.0, every=20, limit=64)", "None", "[['*']]"],
        ),
    ],
    ids=["by name", "by class path", "with a period"],
)
def test_lightning_cli_with_a_hybrid_mode(arguments: list[str], expected: list[str]) -> None:
    (found,) = run_ranks(cli_hybrid, 1, arguments, init="env", deadline=100)
    assert found == expected


def cli_plugin(rank: int, world_size: int) -> str:
    sys.argv = ["train.py"]
    plugin = [
        "--trainer.plugins=lightning_sync.WirePrecision",
        "--trainer.plugins.precision=bf16-mixed",
        "--trainer.plugins.compressor=int8",
    ]
    run = LightningCLI(Toy, args=["fit", *TRAINER, "--trainer.strategy=strict", *plugin], save_config_callback=None)
    return str(run.trainer.strategy.describe())


@pytest.mark.dist
def test_lightning_cli_with_wire_precision() -> None:
    (described,) = run_ranks(cli_plugin, 1, init="env")
    assert "int8" in described
    assert "bf16-mixed" in described


def test_names_are_registered_and_never_replace_somebody_elses() -> None:
    assert all(name in StrategyRegistry for name in NAMES)
    assert StrategyRegistry.get("ddp").__class__ is DDPStrategy


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"strategy='strickt': expected one of strict"):
        ls.strategy("strickt")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"compressor": "int7"},
            ValueError,
            r"compressor='int7': expected one of none, bf16, fp16, fp8, int8, int4, sign",
        ),
        ({"compressor": 8}, ValueError, r"compressor=8: expected one of"),
        ({"aggregator": "median of medians"}, ValueError, r"aggregator='median of medians': expected one of mean"),
        ({"bucket_cap": 5}, TypeError, r"unknown argument bucket_cap\. Did you mean bucket_cap_mb\? Accepted"),
        ({"step_timeout": 0}, ValueError, r"step_timeout=0\): expected a number of seconds above 0"),
        ({"step_timeout": "2 min"}, ValueError, r"step_timeout='2 min'\): expected a number of seconds"),
        ({"setup_timeout": True}, ValueError, r"setup_timeout=True"),
        ({"two_level": 7}, ValueError, r"two_level=7\): expected True or False"),
        ({"error_feedback": "maybe"}, ValueError, r"error_feedback='maybe'\): expected True or False"),
        ({"find_unused_parameters": "yes"}, ValueError, r"find_unused_parameters='yes'\): expected True or False"),
        ({"seed": "x"}, ValueError, r"seed='x'\): expected an integer of at least 0"),
        ({"bucket_cap_mb": "abc"}, ValueError, r"bucket_cap_mb='abc'\): expected a number above 0"),
        ({"bucket_cap_mb": -1}, ValueError, r"bucket_cap_mb=-1\): expected a number above 0"),
        ({"compressor": "int8", "ddp_comm_hook": print}, ValueError, r"both decide what is sent"),
        ({"aggregator": "median", "ddp_comm_hook": print}, ValueError, r"both decide how gradients become one"),
        ({"aggregator": "median", "compressor": "powersgd"}, ValueError, r"refused: it is a sum on the wire"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ls.StrictStrategy(**options)


def test_a_route_takes_names_and_refuses_anything_but_pairs() -> None:
    assert ls.Route([("a*", "int8")]).rules == (("a*", ls.BlockInt8()),)
    with pytest.raises(ValueError, match=r"Route\(rules='int8'\): expected pairs"):
        ls.Route("int8")  # type: ignore[arg-type]


def test_fsdp_takes_no_wire_precision(tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match="FSDP"):
        fit(Toy(), FSDPStrategy(precision_plugin=ls.WirePrecision("32-true", compressor="int8")), 1)
