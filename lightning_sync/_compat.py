"""Every private name of Lightning and torch that this package touches, in one place, each with the reason.

`tests/test_compat.py` looks for all of them, so a new release that moves one fails there and not in a user's run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.distributed_c10d import Store

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

__all__ = ["PatientLauncher", "SIGTERMException", "default_store", "replace_sigterm_broadcasts", "requested_precision"]


def default_store() -> Store:
    """The store of the default process group: the watcher needs one that all ranks share, without a second port."""
    return dist.distributed_c10d._get_default_store()


def requested_precision(trainer: pl.Trainer) -> str:
    """What the user passed as `Trainer(precision=...)`, ``"32-true"`` if nothing.

    Lightning drops it silently when the strategy brings a precision plugin, and keeps it nowhere else.
    """
    return str(trainer._accelerator_connector._precision_flag)


def replace_sigterm_broadcasts(
    trainer: pl.Trainer, request_stop: Callable[[str], None], begin_batch: Callable[[], bool]
) -> None:
    """Take out Lightning's two SIGTERM collectives, and put an agreement without collectives in their place.

    Lightning broadcasts a flag before every training batch, in lock-step and inside an `except Exception` that hides
    dead ranks; and its signal handler broadcasts once more, unmatched if ranks are at different places.

    Args:
        trainer: The trainer, before it registers its signal handlers.
        request_stop: Called in the signal handler.
        begin_batch: Called before every training batch; True when all ranks must stop before it.
    """
    connector = trainer._signal_connector

    def on_sigterm(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        log.info("rank %d received SIGTERM; all ranks will stop before the same batch.", trainer.global_rank)
        if launcher is not None:
            launcher.kill(signum)
        request_stop("SIGTERM")

    def before_batch() -> None:
        if begin_batch():
            rank_zero_info(f"Stopped at step {trainer.global_step}, after SIGTERM, on all ranks alike.")
            connector.received_sigterm = True
            raise SIGTERMException

    connector._sigterm_notifier_fn = on_sigterm  # type: ignore[method-assign,assignment]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = before_batch  # type: ignore[method-assign]


class PatientLauncher(_SubprocessScriptLauncher):
    """Lightning's subprocess launcher, which lets the main process say why it ends.

    Lightning's observer kills the main process at its next look after a child has failed, often before rank 0 has
    printed which rank failed and how. This one looks every second, and then gives it `grace` seconds.
    """

    grace = 6.0

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, unless somebody else does, and call `function`."""
        return super().launch(self._with_patience(function), *args, trainer=trainer, **kwargs)

    def _with_patience(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            for thread in threading.enumerate():
                if isinstance(thread, _ChildProcessObserver) and thread._child_processes is self.procs:
                    thread._sleep_period = 1
                    thread._terminate_all = partial(_after, self.grace, thread._terminate_all)  # type: ignore[method-assign]
            return function(*args, **kwargs)

        return run


def _after(seconds: float, action: Callable[[], None]) -> None:
    time.sleep(seconds)
    action()
