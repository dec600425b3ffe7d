"""The examples are ordinary Lightning code: real data without a download, models that learn in a few steps."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_sync.examples
from lightning_sync.examples.byte_lm import ByteLM
from lightning_sync.examples.digits import Digits
from lightning_sync.examples.digits_cnn import DigitsCNN
from lightning_sync.examples.python_source import PythonSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
]


def fit(model: pl.LightningModule, data: pl.LightningDataModule, steps: int, folder: Path) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        check_val_every_n_epoch=None,
        val_check_interval=steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, datamodule=data)
    return trainer


@pytest.fixture(scope="module")
def source() -> PythonSource:
    data = PythonSource(val_sequences=32)
    data.setup("fit")
    return data


def test_examples_know_nothing_of_the_rest_of_this_package() -> None:
    for path in Path(next(iter(lightning_sync.examples.__path__))).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "", "lightning_sync" * node.level] if isinstance(node, ast.ImportFrom) else []
            ours = [name for name in names if name.startswith("lightning_sync")]
            assert all(name.startswith("lightning_sync.examples.") for name in ours), path


def test_python_source_is_the_same_on_every_rank(source: PythonSource) -> None:
    again = PythonSource(val_sequences=32)
    again.setup("fit")
    for ours, theirs in ((source.train_set, again.train_set), (source.val_set, again.val_set)):
        assert torch.equal(ours.text, theirs.text)
        assert torch.equal(ours.starts, theirs.starts)


def test_python_source_has_enough_text_and_no_crop_of_training_text_in_validation(source: PythonSource) -> None:
    assert len(source.train_set.text) > 5_000_000
    assert len(source.val_set.text) > 300_000
    text = bytes(source.train_set.text.tolist())
    seen = [bytes(source.val_set[i].tolist()) in text for i in range(len(source.val_set))]
    assert sum(seen) <= 1  # licence headers and the like may repeat; files do not


def test_python_source_batch_has_one_byte_more_than_the_model_reads(source: PythonSource) -> None:
    batch = next(iter(source.train_dataloader()))
    assert batch.shape == (8, 129)
    assert batch.dtype == torch.int64
    assert 0 <= batch.min() <= batch.max() <= 255


@pytest.mark.parametrize("name", ["batch_size", "length", "train_sequences", "val_sequences"])
def test_python_source_names_a_wrong_size(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        PythonSource(**{name: 0})


def test_byte_lm_has_about_a_million_parameters() -> None:
    assert 0.9e6 < sum(p.numel() for p in ByteLM().parameters()) < 1.2e6


def test_byte_lm_looks_only_back() -> None:
    torch.manual_seed(0)
    model = ByteLM(width=32, depth=2).eval()
    x = torch.randint(256, (1, 16))
    changed = x.clone()
    changed[0, 10] = (x[0, 10] + 1) % 256
    difference = (model(x) - model(changed)).abs().amax(-1)[0]
    assert torch.all(difference[:10] == 0)
    assert difference[10] > 0


def test_byte_lm_rate_rises_then_falls_to_a_tenth() -> None:
    model = ByteLM(width=32, depth=1)
    rates = [model._rate(step, 1000) for step in range(1001)]
    assert rates[0] == 1 / 50
    assert max(rates) == rates[49] == 1.0
    assert rates[1000] == pytest.approx(0.1)
    assert model._rate(10**6, float("inf")) == 1.0


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"warmup": 1.0}, {"final_lr": -0.1}])
def test_byte_lm_names_a_wrong_argument(wrong: dict[str, float]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        ByteLM(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["width", "depth", "context", "dropout", "lr", "weight_decay", "warmup", "final_lr"])
@pytest.mark.parametrize("value", ["abc", -1, float("nan"), True, None])
def test_byte_lm_names_what_is_no_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}={value} must be "):
        ByteLM(**{name: value})


@pytest.mark.parametrize("wrong", [{"lr": "abc"}, {"lr": 0}, {"lr": float("inf")}, {"width": 0}, {"width": 1.5}])
def test_digits_cnn_names_a_wrong_argument(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"^{name}={value} must be "):
        DigitsCNN(**wrong)


@pytest.mark.parametrize("make", [Digits, PythonSource])
@pytest.mark.parametrize("wrong", [{"batch_size": "abc"}, {"batch_size": 0}, {"seed": -1}, {"num_workers": 0.5}])
def test_data_name_a_wrong_argument(make: Callable[..., object], wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"^{name}={value} must be "):
        make(**wrong)


def test_byte_lm_learns(source: PythonSource, tmp_path: Path) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = fit(ByteLM(width=64, depth=2), source, 40, tmp_path)
    assert trainer.callback_metrics["val_loss"] < 3.6  # 5.55 at the start


def test_digits_are_split_once_and_for_all() -> None:
    first, second = Digits(), Digits()
    first.setup("fit")
    second.setup("validate")
    assert len(first.train_set) == 1437
    assert len(first.val_set) == 360
    assert torch.equal(first.val_set.tensors[0], second.val_set.tensors[0])


def test_digits_cnn_learns(tmp_path: Path) -> None:
    pl.seed_everything(0, verbose=False)
    model = DigitsCNN()
    assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in model.modules())
    trainer = fit(model, Digits(), 120, tmp_path)
    assert trainer.callback_metrics["val_accuracy"] > 0.85
