"""The command `lightning-sync`."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_sync import cli
from tests.conftest import Command


@pytest.mark.parametrize("name", ["report", "inspect"])
def test_every_command_explains_itself_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: lightning-sync {name}" in shown
    assert f"  lightning-sync {name} runs/" in shown


def test_train_explains_itself_with_an_example(command: Command) -> None:
    done = command("-m", "lightning_sync.cli", "train", "--help")
    assert done.returncode == 0, done.stderr
    assert "  lightning-sync train strategy=diloco" in done.stdout
    assert "compressor: " in done.stdout


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_command_gets_what_follows_as_it_is_and_its_code_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = ModuleType("some_command"), []

    def main(arguments: list[str]) -> int:
        seen.extend(arguments)
        return 3

    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_command", module)
    monkeypatch.setattr(module, "__spec__", object())
    monkeypatch.setitem(cli._COMMANDS, "some", ("something", "some_command"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["some", "-o", "x", "--", "a=b"])
    assert ended.value.code == 3
    assert seen == ["-o", "x", "--", "a=b"]


def test_report_runs_as_a_command(command: Command, tmp_path: Path) -> None:
    done = command("-m", "lightning_sync.cli", "report", "nothing")
    assert done.returncode == 1
    assert "nothing: there is no such directory" in done.stderr
