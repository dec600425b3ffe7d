"""The state of WirePrecision under Lightning's own DDPStrategy; and models that are compiled before or after a save."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

import lightning_sync as ls
from lightning_sync.checkpoint.describe import describe
from tests.checkpoint.runs import Seen, differences, run
from tests.models import Toy
from tests.workers import run_ranks

COMPRESSORS: dict[str, Any] = {"int8": "int8", "powersgd": ls.PowerSGD(rank=2, warmup_steps=1)}


def stock(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def train(compressor: str, *, ours: bool = False, precision: str = "32-true", **options: Any) -> Seen:
        plugin = ls.WirePrecision(precision, compressor=COMPRESSORS[compressor])  # type: ignore[arg-type]
        strategy = (ls.StrictStrategy if ours else DDPStrategy)(bucket_cap_mb=0.005)
        seen = run(strategy, world_size, plugins=[plugin], **options)
        if not ours:
            seen.steps, seen.wire_bytes = plugin.counters.steps, plugin.counters.wire_bytes
            assert "save_checkpoint" not in vars(strategy), "the strategy is left as it was"
        return seen

    for name, precision in (("int8", "32-true"), ("powersgd", "16-mixed")):
        place, options = folder / name, {"epochs": 2, "precision": precision}
        whole = train(name, folder=place, **options)
        again = train(name, resume=place / "epoch=0.ckpt", seed=99, **options)
        found[name] = differences(whole, again), {k for k, v in whole.state.items() if any(t.any() for t in v.values())}
        ours = train(name, ours=True, resume=place / "epoch=0.ckpt", seed=99, **options)
        found[f"{name}, resumed by strict"] = differences(whole, ours), set()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_plugin_goes_on_bit_for_bit_under_stock_ddp(world_size: int, tmp_path: Path) -> None:
    for found in run_ranks(stock, world_size, tmp_path, init="env", deadline=120):
        assert [different for different, _ in found.values()] == [[]] * 4, found
        assert {"residual", "owner_residual"} <= found["int8"][1]
        assert {"residual", "factor"} <= found["powersgd"][1]
    assert f"ranks       {world_size}" in describe(tmp_path / "int8" / "epoch=0.ckpt")


class Silent(Toy):
    """torch's tracer fails in the middle of Lightning's `log`."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


def compiled(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def train(how: str, **options: Any) -> Seen:
        # In one bucket: torch's splitting of compiled graphs asks for a first bucket (1 MiB) that is the smallest.
        return run(ls.StrictStrategy("int8"), world_size, epochs=2, kind=Silent, compiled=how, **options)

    whole = {how: train(how, folder=folder / how) for how in ("no", "module", "layers")}
    for before, after in (("module", "no"), ("no", "module"), ("layers", "no"), ("no", "layers")):
        begun: dict[str, Any] = {}
        again = train(
            after,
            resume=folder / before / "epoch=0.ckpt",
            at_start=lambda s, begun=begun: begun.update(s._reducer.state_dict()),
        )
        found[f"{before} to {after}"] = differences(whole[before], again), sorted(begun["residual"])
    return found


@pytest.mark.dist
def test_a_model_compiled_later_or_earlier_finds_its_state(tmp_path: Path) -> None:
    for found in run_ranks(compiled, 2, tmp_path, init="env", deadline=150):
        for name, (different, kept) in found.items():
            assert different == [], name
            assert "layers.0.weight" in kept
