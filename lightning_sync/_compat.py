"""Every private name of Lightning and torch that this package touches, in one place, each with the reason.

`tests/test_compat.py` looks for all of them, so a new release that moves one fails there and not in a user's run.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from lightning_sync.cluster import early

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

__all__ = [
    "PatientLauncher",
    "SIGTERMException",
    "bucket_order",
    "default_store",
    "forget_step_logs",
    "listen_to_compiler",
    "loaded_checkpoint",
    "pin_buckets",
    "profile_all_threads",
    "replace_signal_handling",
    "requested_precision",
    "requeue_signal",
    "set_default_group_timeout",
    "stop_listening_to_compiler",
    "take_buffers_from",
]


def default_store() -> Store:
    """The store of the default process group: the watcher needs one that all ranks share, without a second port."""
    return dist.distributed_c10d._get_default_store()


def requested_precision(trainer: pl.Trainer) -> str:
    """What the user passed as `Trainer(precision=...)`, ``"32-true"`` if nothing.

    Lightning drops it silently when the strategy brings a precision plugin, and keeps it nowhere else.
    """
    return str(trainer._accelerator_connector._precision_flag)


def replace_signal_handling(
    trainer: pl.Trainer, request_stop: Callable[[str], None], begin_batch: Callable[[], bool] | None
) -> None:
    """Take out Lightning's two SIGTERM collectives, put an agreement in their place, and listen to SIGUSR1 as well.

    Lightning broadcasts a flag before every training batch, in lock-step and inside an `except Exception` that hides
    dead ranks; and its signal handler broadcasts once more, unmatched if ranks are at different places.

    Lightning's requeueing under SLURM saves inside the signal handler, each rank wherever it is, which loses the
    collectives' order; its signal asks for a stop here as well, and `requeue_signal` tells who is to requeue.

    SIGUSR1 stays as it is where the user handles it already.

    Args:
        trainer: The trainer, before it registers its signal handlers.
        request_stop: Called in the signal handler, with the signal's name.
        begin_batch: Called before every training batch; True when all ranks must stop before it. `None`: there is one
            rank; Lightning stops it itself, after the batch in which the signal came.
    """
    connector = trainer._signal_connector

    def on_sigterm(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        log.info("rank %d received SIGTERM; all ranks will stop before the same batch.", trainer.global_rank)
        if launcher is not None:
            launcher.kill(signum)
        request_stop("SIGTERM")

    def on_sigusr1(signum: int, frame: Any) -> None:
        name = signal.Signals(signum).name
        log.info("rank %d received %s; all ranks will save and stop before the same batch.", trainer.global_rank, name)
        request_stop(name)
        if begin_batch is None:
            connector.received_sigterm = True

    def register() -> None:
        came_early = early.take()  # also gives the signal back, so that Lightning sees no handler of the user's
        type(connector).register_signal_handlers(connector)
        sigusr1 = getattr(signal, "SIGUSR1", None)
        if sigusr1 is not None and signal.getsignal(sigusr1) == signal.SIG_DFL:
            connector._register_signal(sigusr1, on_sigusr1)  # Lightning puts back what was there, in its teardown
        for signum in came_early:
            on_sigusr1(signum, None)

    def before_batch() -> None:
        assert begin_batch is not None
        if begin_batch():
            connector.received_sigterm = True
            raise SIGTERMException

    connector.register_signal_handlers = register  # type: ignore[method-assign]
    connector._slurm_sigusr_handler_fn = on_sigusr1  # type: ignore[method-assign,assignment]
    if begin_batch is not None:
        connector._sigterm_notifier_fn = on_sigterm  # type: ignore[method-assign,assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = before_batch  # type: ignore[method-assign]


def requeue_signal(trainer: pl.Trainer) -> str | None:
    """Name of the signal after which the job is to be requeued, as Lightning's SLURM environment has it.

    `None`: not under SLURM, or with ``SLURMEnvironment(auto_requeue=False)``.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return None if environment.requeue_signal is None else signal.Signals(environment.requeue_signal).name


def set_default_group_timeout(timeout: timedelta) -> None:
    """Give the default group another time-out (a torch without it keeps its own)."""
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timeout)


Listener = tuple[Any, Callable[[Any], None], Callable[[Any], None]]


def listen_to_compiler(begins: Callable[[], None], ends: Callable[[], None]) -> Listener | None:
    """Call back when torch compiles something, if it was imported for that; `None`: it was not, or cannot tell."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:
        return None

    def on_start(_: Any) -> None:
        begins()

    def on_end(_: Any) -> None:
        ends()

    handler.register_start_callback(on_start)
    handler.register_end_callback(on_end)
    return handler, on_start, on_end


def stop_listening_to_compiler(listener: Listener) -> None:
    """Take the callbacks back."""
    handler, on_start, on_end = listener
    handler.remove_start_callback(on_start)
    handler.remove_end_callback(on_end)


def bucket_order(model: DistributedDataParallel, *, collective: bool = True) -> list[nn.Parameter]:
    """The parameters in the order of DDP's buckets, as laid out after the first step (collective after just one step).

    DDP lays its buckets out anew before its second forward. After a single step that is still to come, and has to be
    done here, unless `collective` is False (then the order is empty); after more, its logging data tells.
    """
    members = [p for p in model.module.parameters() if p.requires_grad]
    rebuilt = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if rebuilt:
        return [members[int(i)] for bucket in rebuilt.split(",") for i in bucket.split()]
    if not collective:
        return []
    model.reducer._rebuild_buckets()
    known = {id(p): p for p in members}
    return [known[id(p)] for bucket in model.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()]


def pin_buckets(model: DistributedDataParallel, order: Sequence[nn.Parameter]) -> None:
    """Lay DDP's buckets out as an earlier run had them (collective), before the first step and before any hook.

    A sum over three or more ranks depends, in its last bits, on where in a buffer a gradient lies. DDP takes the order
    in which gradients become ready in its first backward: here one of zeros, in the given order.
    """
    model.reducer.prepare_for_backward([])
    for p in order:
        torch.autograd.backward(p, torch.zeros_like(p))
    for p in order:
        p.grad = None
    model.reducer._rebuild_buckets()


def take_buffers_from(model: DistributedDataParallel, source: Callable[[], int]) -> None:
    """Let DDP's forward hand out the buffers of the rank that `source` returns, instead of always rank 0's.

    DDP can do that itself inside torch's `Join` only, which has a protocol of its own for ranks without data.
    """
    stock: Callable[[int], None] = model._sync_module_buffers

    def sync(authoritative_rank: int) -> None:
        stock(source())

    model._sync_module_buffers = sync  # type: ignore[method-assign]


def forget_step_logs(trainer: pl.Trainer) -> None:
    """Let the values that were logged in the last training step not be logged for this one as well.

    A step without data logs nothing, but the loggers would be given the latest values again.
    """
    results = trainer._results
    for metric in () if results is None else results.values():
        metric._forward_cache = None


def loaded_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """The checkpoint that is being resumed, between its loading and the first step; else empty.

    A precision plugin is told of it only after it has been connected, and of nothing in it but its own part.
    """
    return trainer._checkpoint_connector._loaded_checkpoint


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


def profile_all_threads() -> Any:
    """What makes torch's profiler see threads that it was not started on. There is no public way."""
    from torch._C._profiler import _ExperimentalConfig  # late: private, and nobody else needs it

    return _ExperimentalConfig(profile_all_threads=True)
