"""Every private name of Lightning and torch that we touch still exists, and still means what we think.

When a new release breaks one of these, mend `lightning_sync/_compat.py`, not the test.
"""

import ast
import inspect
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn.parallel import DistributedDataParallel

from lightning_sync import _compat
from lightning_sync.cluster import early
from lightning_sync.comm import spans


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_default_store() -> None:
    assert parameters(dist.distributed_c10d._get_default_store) == []
    with pytest.raises(ValueError, match="not been initialized"):
        _compat.default_store()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_requested_precision(precision: str) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, precision=precision, logger=False, enable_checkpointing=False)  # type: ignore[arg-type]
    assert _compat.requested_precision(trainer) == precision


def test_nothing_requested_reads_as_full_precision(trainer: Trainer) -> None:
    assert _compat.requested_precision(trainer) == "32-true"


def test_the_names_that_are_replaced_exist_and_are_used(trainer: Trainer) -> None:
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    assert parameters(connector._sigterm_notifier_fn) == ["signum", "_"]
    assert connector.received_sigterm is False
    assert parameters(loop._broadcast_sigterm_tensor) == []
    assert "self._sigterm_notifier_fn" in inspect.getsource(type(connector).register_signal_handlers)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)


def test_sigterm_goes_to_the_agreement_and_no_collective_is_left(trainer: Trainer) -> None:
    asked: list[str] = []
    stop = [False]
    _compat.replace_signal_handling(trainer, asked.append, lambda: stop[0])
    trainer._signal_connector._sigterm_notifier_fn(15, None)
    assert asked == ["SIGTERM"]
    assert trainer._signal_connector.received_sigterm is False, "only once all ranks have agreed"
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    stop[0] = True
    with pytest.raises(SIGTERMException):
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert trainer._signal_connector.received_sigterm is True


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
def test_sigusr1_is_listened_to_unless_somebody_does_already(trainer: Trainer) -> None:
    asked: list[str] = []
    connector = trainer._signal_connector
    _compat.replace_signal_handling(trainer, asked.append, lambda: False)
    connector.register_signal_handlers()
    signal.raise_signal(signal.SIGUSR1)
    assert asked == ["SIGUSR1"]
    connector.teardown()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "Lightning has put it back"

    theirs = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, theirs)
    try:
        connector.register_signal_handlers()
        assert signal.getsignal(signal.SIGUSR1) is theirs
        connector.teardown()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
def test_lightnings_requeue_signal_asks_for_a_stop_instead_of_saving_in_the_handler(trainer: Trainer) -> None:
    asked: list[str] = []
    assert _compat.requeue_signal(trainer) is None
    trainer._accelerator_connector.cluster_environment = SLURMEnvironment(
        auto_requeue=True, requeue_signal=signal.SIGUSR1
    )
    connector = trainer._signal_connector
    assert parameters(type(connector)._slurm_sigusr_handler_fn) == ["self", "signum", "_"]
    assert _compat.requeue_signal(trainer) == "SIGUSR1"
    _compat.replace_signal_handling(trainer, asked.append, lambda: False)
    connector.register_signal_handlers()
    signal.raise_signal(signal.SIGUSR1)
    connector.teardown()
    assert asked == ["SIGUSR1"]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
def test_a_signal_that_came_before_training_asks_for_a_stop_when_it_begins(trainer: Trainer) -> None:
    asked: list[str] = []
    early.listen()
    signal.raise_signal(signal.SIGUSR1)
    _compat.replace_signal_handling(trainer, asked.append, lambda: False)
    trainer._signal_connector.register_signal_handlers()
    trainer._signal_connector.teardown()
    assert asked == ["SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_the_time_out_of_the_default_group(alone: None) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    _compat.set_default_group_timeout(timedelta(seconds=77))
    assert backend.options._timeout == timedelta(seconds=77)


def test_compilation_is_heard_of() -> None:
    heard: list[str] = []
    import torch._dynamo  # as torch.compile does

    listener = _compat.listen_to_compiler(lambda: heard.append("begins"), lambda: heard.append("ends"))
    assert listener is not None
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        _compat.stop_listening_to_compiler(listener)
    assert heard[:2] == ["begins", "ends"]
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert len(heard) % 2 == 0
    assert heard.count("begins") == heard.count("ends")


def test_the_launcher_and_its_observer() -> None:
    assert parameters(_SubprocessScriptLauncher.__init__)[1:] == ["cluster_environment", "num_processes", "num_nodes"]
    assert parameters(_SubprocessScriptLauncher.launch)[1:] == ["function", "args", "trainer", "kwargs"]
    assert "procs" in inspect.getsource(_SubprocessScriptLauncher.__init__)
    children: list[subprocess.Popen[bytes]] = []
    observer = _ChildProcessObserver(main_pid=0, child_processes=children)  # type: ignore[arg-type]
    assert observer._child_processes is children
    assert isinstance(observer._sleep_period, int)
    assert parameters(observer._terminate_all) == []
    assert isinstance(observer, threading.Thread)
    assert "self._terminate_all()" in inspect.getsource(_ChildProcessObserver._run)
    assert "self._sleep_period" in inspect.getsource(_ChildProcessObserver.run)


def test_what_the_strategies_override_or_read() -> None:
    """Not in `_compat`, since they belong to classes that ours extend."""
    for name in ("_configure_launcher", "_setup_model", "precision_plugin"):
        assert hasattr(DDPStrategy, name), name
    source = inspect.getsource(DDPStrategy)
    for name in ("_start_method", "_launcher", "_ddp_comm_hook"):
        assert name in source, name
    assert hasattr(dist.ProcessGroup, "rank")
    assert hasattr(torch, "_foreach_copy_")
    assert hasattr(torch, "_foreach_add_")
    assert hasattr(torch, "_foreach_mul_")


def layout(model: DistributedDataParallel) -> list[list[str]]:
    names = {id(p): name for name, p in model.module.named_parameters()}
    return [[names[id(p)] for p in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_buckets() -> DistributedDataParallel:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(5)])
    return DistributedDataParallel(model, bucket_cap_mb=0.002)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_order_of_buckets_is_the_one_after_the_first_step(steps: int, alone: None) -> None:
    model = small_buckets()
    before = layout(model)
    for _ in range(steps):
        model(torch.randn(2, 16)).sum().backward()
    names = {p: name for name, p in model.module.named_parameters()}
    order = [names[p] for p in _compat.bucket_order(model)]
    assert order == [name for bucket in layout(model) for name in bucket]
    assert layout(model) != before
    assert len(layout(model)) > 1


def test_buckets_stay_as_they_were_pinned_with_and_without_a_hook(alone: None) -> None:
    """`_rebuild_buckets` takes the order of the first backward, and only that one; a hook may come afterwards."""
    model = small_buckets()
    named = dict(model.module.named_parameters())
    order = sorted(named, key=lambda name: (name[::-1], name))
    _compat.pin_buckets(model, [named[name] for name in order])
    pinned = layout(model)
    assert [name for bucket in pinned for name in bucket] == order
    assert all(p.grad is None for p in named.values())
    seen: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(len(bucket.parameters()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(2):
        seen.clear()
        model(torch.randn(2, 16)).sum().backward()
        assert seen == [len(bucket) for bucket in pinned], "from the first step on"
    assert layout(model) == pinned


def test_ddp_takes_buffers_from_the_rank_that_it_is_told_before_every_forward(alone: None) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    sources: list[int] = []
    model._sync_module_buffers = sources.append
    asked: list[int] = []

    def source() -> int:
        asked.append(len(asked))
        return 7

    _compat.take_buffers_from(model, source)
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    assert asked == [0, 1]
    assert sources == [7, 7]


def test_step_logs_are_forgotten_but_not_those_of_the_epoch(trainer: Trainer) -> None:
    results = trainer.fit_loop.epoch_loop._results
    trainer.training = True
    results.log("training_step", "loss", torch.tensor(3.0), on_step=True, on_epoch=True, batch_size=2)
    _compat.forget_step_logs(trainer)
    assert results.metrics(on_step=True)["log"] == {}
    assert results.metrics(on_step=False)["log"] == {"loss_epoch": torch.tensor(3.0)}


def test_loaded_checkpoint(trainer: Trainer) -> None:
    assert _compat.loaded_checkpoint(trainer) == {}


def test_a_profiler_of_all_threads_hears_of_spans_on_others() -> None:
    heard = []

    def work() -> None:
        heard.append(spans.profiling())
        with spans.span("here"):
            torch.ones(3).sum()

    options = {"activities": [torch.profiler.ProfilerActivity.CPU]}
    with torch.profiler.profile(**options, experimental_config=_compat.profile_all_threads()) as profiler:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "lightning_sync::here" in {event.name for event in profiler.events()}
    assert heard == [True]
    assert not spans.profiling()


TESTED = {
    "_ExperimentalConfig",
    "_checkpoint_connector",
    "_forward_cache",
    "_results",
    "_sync_module_buffers",
    "_loaded_checkpoint",
    "_get_ddp_logging_data",
    "_get_zeros_like_grad_buckets",
    "_rebuild_buckets",
    "_ChildProcessObserver",
    "_SubprocessScriptLauncher",
    "_accelerator_connector",
    "_broadcast_sigterm_tensor",
    "_child_processes",
    "_get_default_store",
    "_precision_flag",
    "_register_signal",
    "_signal_connector",
    "_slurm_sigusr_handler_fn",
    "_sigterm_notifier_fn",
    "_sleep_period",
    "_terminate_all",
}


def test_every_private_name_in_compat_is_tested_here() -> None:
    tree = ast.parse(Path(_compat.__file__).read_text(encoding="utf-8"))
    own = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    used |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    private = {n for n in used if n.startswith("_") and not n.startswith("__")} - own
    assert private == TESTED
