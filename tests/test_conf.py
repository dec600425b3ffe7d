"""Every YAML that is shipped composes and instantiates, in our own entry and in another Hydra application."""

from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import InstantiationException, MissingConfigException
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, ListConfig, OmegaConf

import lightning_sync as ls
from lightning_sync.entry.config import settle
from lightning_sync.entry.ranks import Ranks

LIBRARY = {"strategy", "compressor", "aggregator", "precision"}
ENTRY = {"model", "data", "trainer", "logger", "experiment"}


def choices(module: str) -> list[tuple[str, str]]:
    """All (group, choice) pairs below a configuration package."""
    root = Path(str(resources.files(module)))
    found = [path.relative_to(root) for path in sorted(root.rglob("*.yaml"))]
    found = [path for path in found if path.parts[0] != "hydra"]  # for Hydra itself, not for a run
    return [(path.parent.as_posix(), path.stem) for path in found if path.parent != Path()]


def groups(module: str) -> set[str]:
    entries = resources.files(module).iterdir()
    return {entry.name for entry in entries if entry.is_dir() and entry.name != "__pycache__"}


@pytest.fixture
def foreign(tmp_path: Path) -> Any:
    """Another application: its own trainer node and model, and one line for our groups."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "theirs.yaml").write_text("name: theirs\n")
    (tmp_path / "app.yaml").write_text(
        "defaults: [{model: theirs}, _self_]\n"
        "hydra: {searchpath: ['pkg://lightning_sync.conf']}\n"
        "trainer: {_target_: lightning.pytorch.Trainer, accelerator: cpu, devices: 2, logger: false, strategy: ddp}\n"
    )

    def app(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose("app", overrides=list(overrides))

    return app


@pytest.fixture
def entry(tmp_path: Path) -> Any:
    """Our own entry's configuration, settled for two CPU ranks."""

    def composed(*overrides: str) -> DictConfig:
        with initialize_config_module("lightning_sync.examples.conf", version_base="1.3"):
            cfg = compose("train", overrides=list(overrides), return_hydra_config=True)
        chosen = cfg.hydra.runtime.choices
        OmegaConf.set_readonly(cfg, False)
        settle(cfg, Ranks("self", "cpu", 2, 1), tmp_path / "run", chosen)
        return cfg

    return composed


def configs_inside(value: Any, depth: int = 6) -> list[Any]:
    """Every OmegaConf container that is reachable from a value."""
    if isinstance(value, (DictConfig, ListConfig)):
        return [value]
    if depth == 0 or isinstance(value, (str, int, float, type(None))):
        return []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    inner = [*inner, *getattr(value, "__dict__", {}).values()]
    return [found for item in inner for found in configs_inside(item, depth - 1)]


def test_other_applications_see_only_the_librarys_groups() -> None:
    assert groups("lightning_sync.conf") - {"hydra"} == LIBRARY
    assert groups("lightning_sync.examples.conf") == ENTRY
    assert not [path for path in resources.files("lightning_sync.conf").iterdir() if path.name.endswith(".yaml")]


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@pytest.mark.parametrize(("group", "choice"), choices("lightning_sync.conf"))
def test_library_choice_instantiates_in_another_application(foreign: Any, group: str, choice: str) -> None:
    node = {
        "strategy": "@trainer.strategy",
        "compressor": "@trainer.strategy.compressor",
        "aggregator": "@trainer.strategy.aggregator",
    }.get(group, "")
    under = [] if group in ("strategy", "precision") else ["+strategy@trainer.strategy=strict"]
    trainer = instantiate(foreign(*under, f"+{group}{node}={choice}").trainer)
    assert isinstance(trainer, pl.Trainer)
    assert isinstance(trainer.strategy, DDPStrategy)


@pytest.mark.parametrize(("group", "choice"), choices("lightning_sync.examples.conf"))
def test_entry_choice_instantiates(entry: Any, group: str, choice: str) -> None:
    cfg = entry(f"{group}={choice}")
    if (group, choice) == ("logger", "none"):
        assert not cfg.logger
    elif (group, choice) == ("logger", "wandb") and find_spec("wandb") is None:
        with pytest.raises(InstantiationException, match="wandb"):
            instantiate(cfg.logger)
    elif group == "experiment":
        for node in (cfg.model, cfg.data, cfg.trainer):
            instantiate(node, _convert_="all")
    else:
        instantiate(cfg[group], _convert_="all")


def test_the_launcher_for_sweeps_instantiates_in_another_application(foreign: Any, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("app", overrides=["hydra/launcher=slurm"], return_hydra_config=True)
    launcher = instantiate(cfg.hydra.launcher)
    assert launcher.params["tasks_per_node"] == 2
    assert launcher.params["nodes"] == 1


@pytest.mark.parametrize(
    "override", ["trainer.strategy.compressor=int8", "+compressor@trainer.strategy.compressor=int8"]
)
def test_another_application_gets_our_strategy_with_a_compressor(foreign: Any, override: str) -> None:
    trainer = instantiate(foreign("+strategy@trainer.strategy=strict", override).trainer)
    assert isinstance(trainer.strategy, ls.StrictStrategy)
    assert trainer.strategy.compressor == ls.BlockInt8()


def test_another_applications_groups_are_not_shadowed(foreign: Any) -> None:
    assert foreign().model == {"name": "theirs"}
    with pytest.raises(MissingConfigException):
        foreign("model=byte_lm")
    assert foreign("+data=digits").data == "digits"  # no group of this name: a plain value


def test_groups_compose_into_the_strategy_of_our_entry(entry: Any) -> None:
    cfg = entry("strategy=strict", "compressor=int8", "compressor.block=64", "strategy.bucket_cap_mb=5")
    strategy = instantiate(cfg.trainer, _convert_="all").strategy
    assert strategy.compressor == ls.BlockInt8(block=64)
    assert strategy._ddp_kwargs["bucket_cap_mb"] == 5


def test_no_omegaconf_container_reaches_a_strategy(entry: Any, foreign: Any) -> None:
    node = {"strategy": "strict", "_extra": None}
    assert configs_inside(OmegaConf.create(node))  # the search finds one where there is one
    ours = instantiate(entry("compressor=powersgd").trainer, _convert_="all").strategy
    theirs = instantiate(foreign("+strategy@trainer.strategy=strict").trainer).strategy
    assert configs_inside(ours) == configs_inside(theirs) == []


def test_precision_alone_sets_the_trainers_precision(entry: Any) -> None:
    assert entry("precision=bf16-mixed").trainer.precision == "bf16-mixed"


def test_wire_precision_holds_the_compressor_under_plain_ddp(entry: Any) -> None:
    trainer = instantiate(entry("experiment=wire_precision").trainer, _convert_="all")
    assert type(trainer.strategy) is DDPStrategy
    assert trainer.precision_plugin.compressor == ls.BlockInt8()
    assert trainer.precision == "bf16-mixed"


def test_strict_under_wire_precision_takes_the_plugins_compressor(entry: Any) -> None:
    trainer = instantiate(entry("precision=wire", "compressor=int8").trainer, _convert_="all")
    assert trainer.strategy.compressor is None
    assert trainer.strategy.effective_compressor == ls.BlockInt8()
