"""What a strategy tells its watcher, and what it does when ranks have agreed to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.constants import default_pg_timeout

from lightning_sync import _compat
from lightning_sync.cluster.requeue import is_to_requeue, requeue
from lightning_sync.cluster.slurm import Job, current_job
from lightning_sync.comm.board import Board
from lightning_sync.comm.progress import COMPILATION, END, FORWARD, SAVING, SETUP, VALIDATION, Place
from lightning_sync.comm.watch import Watcher
from lightning_sync.strategies.meetings import Meetings

log = logging.getLogger(__name__)

_AGREED_WITHIN = 10.0
_REQUEUED_WITHIN = 120.0  # longer than all attempts of rank 0 take


class Watched(Meetings):
    """Tells the watcher in which phase the main thread is, and saves when SIGTERM or SIGUSR1 ends the run.

    Attributes:
        stopped_because: Why ranks agreed to stop, once they have; with the rank that asked.
        stopped_at: The checkpoint that was saved then.
        requeued: The SLURM job that was put back into the queue then; None if none was.
        store_prefix: What the keys of this fit in the store start with.
    """

    step_timeout: float
    stacks_dir: str | Path | None
    stopped_because: str | None = None
    stopped_at: str | None = None
    requeued: str | None = None
    store_prefix: str = ""
    _watcher: Watcher | None = None
    _job: Job | None = None
    _requeue_signal: str | None = None
    _signal: str | None = None
    _listening: _compat.Listener | None = None
    _outside_validation: Place = SETUP
    _outside_compilation: Place = SETUP

    @property
    def _setup_seconds(self) -> float:
        return (self._timeout or default_pg_timeout).total_seconds()

    @property
    def group_timeout(self) -> float:
        """Seconds for the groups' own clocks, which name nobody: long enough for the watcher to come first."""
        return max(default_pg_timeout.total_seconds(), self._setup_seconds, 4 * self.step_timeout)

    def start_watching(self, trainer: Trainer, run: str) -> Watcher:
        """Make the watcher of one fit (all ranks; `run` is its random id)."""
        log_dir = trainer.log_dir if self.stacks_dir is None else None  # a broadcast: all ranks or none
        self.stopped_because = self.stopped_at = self.requeued = self._signal = None
        self._requeue_signal = _compat.requeue_signal(trainer)
        self._job = None if self._requeue_signal is None else current_job()
        self.store_prefix = f"lightning_sync/{run}"
        self._watcher = Watcher(
            _compat.default_store(),
            self.global_rank,
            self.world_size,
            prefix=self.store_prefix,
            step_timeout=self.step_timeout,
            first_timeout=self._setup_seconds,
            lost_after=self.step_timeout,
            store_timeout=max(10.0, self.step_timeout),
            stacks=Path(self.stacks_dir or Path(log_dir or trainer.default_root_dir) / "stacks"),
        )
        _compat.replace_signal_handling(trainer, self._request_stop, self._begin_batch if self.world_size > 1 else None)
        return self._watcher

    def after_setup(self) -> None:
        """Make the default group's clock slower than the watcher's, and listen for compilation."""
        _compat.set_default_group_timeout(timedelta(seconds=self.group_timeout))
        if self._watcher is not None and self._listening is None:
            self._listening = _compat.listen_to_compiler(self._compilation_begins, self._compilation_ends)

    def attached_trainer(self) -> Trainer | None:
        """The trainer that uses this strategy now."""
        module = self.lightning_module
        return None if module is None or module._trainer is None else module.trainer

    def trainer_interrupted(self) -> bool:
        """Whether an exception or a signal has ended the run."""
        trainer = self.attached_trainer()
        return trainer is not None and trainer.interrupted

    def stop_watching(self) -> None:
        """Close the watcher; no collective."""
        if self._listening is not None:
            _compat.stop_listening_to_compiler(self._listening)
            self._listening = None
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _at(self, place: Place) -> None:
        if self._watcher is not None:
            self._watcher.place = place

    @contextmanager
    def _saving(self) -> Generator[None, None, None]:
        if self._watcher is None:
            yield
            return
        with self._watcher.at(SAVING):
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note that the batch is there."""
        self._at(FORWARD)
        super().on_train_batch_start(batch, batch_idx)

    def on_validation_start(self) -> None:
        """Stop the clock of the step."""
        if self._watcher is not None:
            self._outside_validation, self._watcher.place = self._watcher.place, VALIDATION
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Let the clock of the step go on."""
        self._at(self._outside_validation)
        super().on_validation_end()

    def on_train_end(self) -> None:
        """No step will follow."""
        self._at(END)
        super().on_train_end()

    def _compilation_begins(self) -> None:
        if self._watcher is not None:
            self._outside_compilation, self._watcher.place = self._watcher.place, COMPILATION

    def _compilation_ends(self) -> None:
        self._at(self._outside_compilation)

    # ---- stops -------------------------------------------------------------------------------------------------------

    def _request_stop(self, signal: str) -> None:
        """In a signal handler: attributes only."""
        self._signal = signal
        if self._watcher is not None:
            self._watcher.request_stop(signal)

    def _begin_batch(self) -> bool:
        assert self._watcher is not None
        stops = self._watcher.begin_step()
        if stops:
            self._save_and_stop(self._watcher)
        return stops

    def save_alone(self) -> None:
        """Save after a stop of the only rank, for which Lightning has raised already."""
        if self._watcher is None:
            return
        self._request_stop(self._signal or "SIGTERM")
        until = time.monotonic() + _AGREED_WITHIN
        while self._watcher.stop_at is None and time.monotonic() < until:
            time.sleep(0.01)
        self._save_and_stop(self._watcher)

    def _save_and_stop(self, watcher: Watcher) -> None:
        """Save on all ranks, which all are at the same boundary between two steps."""
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        self.stopped_because = watcher.stop_reason
        what = f"Stopped at step {trainer.global_step}, on all ranks alike, after {self.stopped_because}."
        callback = trainer.checkpoint_callback
        if callback is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(f"{what} Nothing is saved, since the Trainer has enable_checkpointing=False.")
            return
        folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
        path = f"{str(folder).rstrip('/')}/stopped-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        self.stopped_at = path
        rank_zero_info(f"{what} Go on with ckpt_path={path}")
        if self._job is not None and self._requeue_signal is not None:
            self._requeue(watcher, self._job, self._requeue_signal)

    def _requeue(self, watcher: Watcher, job: Job, signal: str) -> None:
        """Rank 0 requeues, where that is wanted; nobody leaves before, since srun may then end what is left."""
        board = Board(_compat.default_store(), f"{self.store_prefix}/requeue")
        if self.global_rank == 0:
            wanted = is_to_requeue(job, str(self.stopped_because), signal)
            problem = requeue(job) if wanted else None
            if problem is not None:
                rank_zero_warn(f"{problem} The checkpoint is saved; submit the job again to go on from it.")
            self.requeued = job.job if wanted and problem is None else None
            board.put("done", self.requeued or "")
            return
        until = time.monotonic() + _REQUEUED_WITHIN
        while not board.has("done"):
            watcher.check()
            if time.monotonic() > until:
                log.warning("rank %d has not heard whether rank 0 has requeued job %s", self.global_rank, job.job)
                return
            time.sleep(0.05)
        self.requeued = board.read("done") or None
