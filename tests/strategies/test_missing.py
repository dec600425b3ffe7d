"""A rank that is missing ends the run on all ranks within the deadline, by name, with everybody's stacks on disk."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_sync as ls
from lightning_sync.comm.failure import RemoteFailure
from tests.models import Toy, fit
from tests.workers import RankOutcome, launch_ranks

pytestmark = [pytest.mark.dist, pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")]

WHEN, TIMEOUT, WITHIN = 4, 4.0, 30.0


class Hanging(Toy):
    """Rank 1 does not come back from a batch: it is blocked in C, where no Python signal handler runs."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.trainer.global_step == WHEN:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().training_step(batch, batch_idx)


def make(mode: str, world_size: int, **options: Any) -> Any:
    if mode == "un-wrapped":
        return ls.UnwrappedStrategy(replica=world_size, **options)
    return ls.StrictStrategy(compressor=None if mode == "strict" else "int8", bucket_cap_mb=0.005, **options)


def hang(rank: int, world_size: int, mode: str, folder: Path) -> None:
    torch.manual_seed(0)
    fit(Hanging(), make(mode, world_size, step_timeout=TIMEOUT, stacks_dir=folder), world_size, max_steps=1000)


def check(outcomes: list[RankOutcome], folder: Path) -> None:
    for outcome in outcomes:
        assert outcome.exit_code in (1, 70), outcome.stderr[-3000:]
        assert f"its step has not ended within {TIMEOUT:g} s (step_timeout)" in outcome.stderr
        assert "rank 1 (host " in outcome.stderr
        assert f"step {WHEN + 1} in forward: TimeoutError" in outcome.stderr
        stacks = (folder / f"rank-{outcome.rank}.txt").read_text()
        assert "most recent call first" in stacks
        assert "fit" in stacks


@pytest.mark.parametrize("mode", ["strict", "un-wrapped"])
def test_a_rank_that_hangs_is_named_and_ended_with_all_others(mode: str, tmp_path: Path) -> None:
    outcomes = launch_ranks(hang, 3, mode, tmp_path, init="env", deadline=WITHIN + 60)
    check(outcomes, tmp_path)
    assert outcomes[1].exit_code == 70, "blocked in C: ended by force"
    assert "waiting for it: ranks 0, 2" in outcomes[0].stderr
    assert "in training_step" in (tmp_path / "rank-1.txt").read_text(), "where the rank hangs"


def slow_phases(rank: int, world_size: int, folder: Path) -> int:
    """Validation, saving and compilation of one rank take longer than a step may."""

    class Slow(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if rank == 1:
                time.sleep(2.5)
            super().validation_step(batch, batch_idx)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if rank == 1 and self.trainer.global_step == 3:
                import torch._dynamo

                with torch._dynamo.callback.callback_handler.install_callbacks(
                    torch._dynamo.callback.CallbackTrigger.DYNAMO, "0/0"
                ):
                    time.sleep(2.5)
            return super().training_step(batch, batch_idx)

    class SlowSaving(ls.StrictStrategy):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with self._saving():
                time.sleep(2.5 if rank == 0 else 0)
            super().save_checkpoint(*args, **kwargs)

    torch.manual_seed(0)
    strategy = SlowSaving(step_timeout=1.2, stacks_dir=folder)
    trainer = fit(Slow(), strategy, world_size, max_steps=6, val_check_interval=4, limit_val_batches=1)
    trainer.save_checkpoint(folder / "a.ckpt")
    return int(trainer.global_step)


def test_validation_saving_and_compilation_do_not_count(tmp_path: Path) -> None:
    outcomes = launch_ranks(slow_phases, 2, tmp_path, init="env", deadline=90)
    assert [o.result for o in outcomes] == [6, 6], outcomes[0].stderr[-3000:] + outcomes[1].stderr[-3000:]


def catch_and_leave(rank: int, world_size: int, folder: Path) -> str:
    """Rank 0 catches the time-out of a collective that rank 1, which lives on, has not joined, and ends normally."""
    torch.manual_seed(0)

    class Late(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if rank == 1 and self.trainer.global_step == WHEN:
                raise ZeroDivisionError("boom")
            return super().training_step(batch, batch_idx)

    try:
        fit(Late(), make("strict, int8", world_size, stacks_dir=folder), world_size, max_steps=1000)
    except (RemoteFailure, ZeroDivisionError) as error:
        if rank == 1:
            time.sleep(8)  # its sockets stay open all the while
        return type(error).__name__
    return ""


def test_a_program_that_catches_the_failure_ends_normally(tmp_path: Path) -> None:
    outcomes = launch_ranks(catch_and_leave, 2, tmp_path, init="env", deadline=90)
    assert [o.exit_code for o in outcomes] == [0, 0], outcomes[0].stderr[-3000:]
    assert [o.result for o in outcomes] == ["RemoteFailure", "ZeroDivisionError"]
    assert "terminate called" not in outcomes[0].stderr + outcomes[1].stderr
