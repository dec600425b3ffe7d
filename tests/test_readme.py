"""The README and the guides are executed: their Python runs, their command lines exist, their tables are the code's."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_sync import aggregators
from lightning_sync.compressors.resolve import to_route
from lightning_sync.validity import aggregator_table, table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "recipes" / "guide").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    shlex.split(line, comments=True)
    for language, text in BLOCKS
    if language == "bash"
    for line in text.strip().splitlines()
]


@pytest.mark.filterwarnings("ignore:isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.parametrize("source", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def test_scripts_exist_and_can_be_executed() -> None:
    scripts = [words[0] for words in COMMANDS if words[0].startswith("./")]
    assert scripts
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111, script


@pytest.mark.dist
@pytest.mark.parametrize(
    "words", [w for w in COMMANDS if w[:3] == ["python", "-m", "lightning_sync.train"]], ids=" ".join
)
def test_command_lines_train(words: list[str], command: object) -> None:
    short = ["trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.enable_progress_bar=false"]
    overrides = [w for w in words[1:] if not w.startswith("trainer.max_steps")]
    done = command(*overrides, *short)  # type: ignore[operator]
    assert done.returncode == 0, done.stderr
    assert "wire_bytes_per_step" in done.stdout


def test_a_third_partys_compressor_is_a_short_file_and_a_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README shows it, in an application of its own."""
    (source,) = [text for text in PYTHON if "class Ternary" in text]
    assert len(source.splitlines()) < 40
    (tmp_path / "my_ternary.py").write_text(source)
    (node,) = [text for language, text in BLOCKS if language == "yaml" and "my_ternary" in text]
    (tmp_path / "conf" / "compressor").mkdir(parents=True)
    (tmp_path / "conf" / "compressor" / "ternary.yaml").write_text(node)
    (tmp_path / "conf" / "app.yaml").write_text(
        "hydra: {searchpath: ['pkg://lightning_sync.conf']}\n"
        "trainer: {_target_: lightning.pytorch.Trainer, accelerator: cpu, devices: 1, logger: false}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        overrides = ["+strategy@trainer.strategy=strict", "+compressor@trainer.strategy.compressor=ternary"]
        strategy = instantiate(compose("app", overrides=overrides).trainer).strategy
    assert repr(strategy.compressor) == "Ternary(block=128)"
    assert repr(to_route(strategy.compressor).rules[0][1]) == "ErrorFeedback(inner=Ternary(block=128), decay=1.0)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_table_of_what_composes_is_current() -> None:
    assert table() in TEXT
    assert aggregator_table() in TEXT


def test_every_aggregator_has_a_row_that_says_what_it_computes() -> None:
    for name in aggregators.registry:
        assert len(re.findall(rf"^\| `{name}` \| .+ \| .+ \| 1[.\d]* \|$", TEXT, re.MULTILINE)) == 1, name
