"""When a save or a resume fails, all ranks end with the reason, and the checkpoint before is as it was."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

import lightning_sync as ls
from lightning_sync.checkpoint import SyncFolder
from lightning_sync.checkpoint.describe import describe
from tests.checkpoint.runs import run
from tests.workers import RankOutcome, launch_ranks, run_ranks

WITHIN = 40.0


class SaveEach(Callback):
    """Saves to one path after every epoch; `before` is called in front of the second."""

    def __init__(self, path: Path, before: Callable[[], None]) -> None:
        self.path, self.before = path, before

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.before()
        trainer.save_checkpoint(self.path)


def nothing() -> None:
    pass


def no_space() -> None:
    """Writing more than 24 kB to a file fails, as it does on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, resource.RLIM_INFINITY))


def no_permission() -> None:
    os.seteuid(65534)


def fail_to_save(rank: int, world_size: int, path: Path, kind: str, on: list[int], compressor: str) -> None:
    before = {"space": no_space, "permission": no_permission}[kind] if rank in on else nothing
    try:
        model = {"adam": True, "depth": 8}
        run(ls.StrictStrategy(compressor), world_size, epochs=3, extra=[SaveEach(path, before)], model=model)
    finally:  # so that what went wrong can be written down
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.seteuid(os.getuid())


def check_ended(outcomes: list[RankOutcome], *reasons: str) -> None:
    assert all(o.exit_code != 0 for o in outcomes)
    assert all(o.seconds < WITHIN for o in outcomes)
    for outcome in outcomes:
        assert any(r in f"{outcome.error}\n{outcome.stderr}" for r in reasons), outcome.stderr[-3000:]


def check_untouched(path: Path) -> None:
    """The checkpoint of the first epoch is there with its state, and a new run goes on from it."""
    assert "step        4" in describe(path)
    assert len(SyncFolder(path).saves()) == 1
    steps = run_ranks(go_on, 2, path, init="env")
    assert steps == [(4, 8)] * 2


def go_on(rank: int, world_size: int, path: Path) -> tuple[int, int]:
    model = {"adam": True, "depth": 8}
    seen = run(ls.StrictStrategy("int8"), world_size, epochs=2, resume=path, model=model)
    return len(seen.losses), seen.steps


@pytest.mark.dist
@pytest.mark.parametrize(
    ("on", "compressor"),
    [([1], "int8"), ([0], "int8"), ([0], "none")],
    ids=["state of rank 1", "state of rank 0", "the checkpoint itself"],
)
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(
    on: list[int], compressor: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    outcomes = launch_ranks(fail_to_save, 2, path, "space", on, compressor, init="env", deadline=60)
    check_ended(outcomes, "File too large")
    check_untouched(path)


@pytest.mark.dist
@pytest.mark.skipif(os.getuid() != 0, reason="changes to another user, which needs root")
def test_a_directory_without_permission_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    outcomes = launch_ranks(fail_to_save, 2, path, "permission", [0, 1], "int8", init="env", deadline=60)
    check_ended(outcomes, "Permission denied")
    check_untouched(path)


def save_once(rank: int, world_size: int, folder: Path) -> None:
    run(ls.StrictStrategy("int8"), world_size, epochs=1, folder=folder)


def resume(rank: int, world_size: int, folder: Path) -> None:
    run(ls.StrictStrategy("int8"), world_size, epochs=2, resume=folder / "epoch=0.ckpt")


@pytest.mark.dist
def test_a_damaged_file_ends_the_resume_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(save_once, 2, tmp_path, init="env")
    folder = SyncFolder(tmp_path / "epoch=0.ckpt")
    (save,) = folder.saves()
    path = folder.path / save / "rank-00001.pt"
    content = path.read_bytes()
    path.write_bytes(content[:1000] + b"\x00\xff" + content[1002:])
    outcomes = launch_ranks(resume, 2, tmp_path, init="env", deadline=60)
    check_ended(outcomes, "SHA-256 is not the manifest's")
    assert "StateFileError" in str(outcomes[1].error)

    path.write_bytes(content)
    manifest = folder.path / save / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))
    outcomes = launch_ranks(resume, 2, tmp_path, init="env", deadline=60)
    check_ended(outcomes, "checksum does not match")
