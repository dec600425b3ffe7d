"""What all strategies share: options, groups, the watcher, and what happens when something goes wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_sync import _compat, aggregators, compressors
from lightning_sync.aggregators import Aggregator
from lightning_sync.checkpoint.manifest import LOCAL
from lightning_sync.checks import check_flags, check_integer, check_positive, check_seconds
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.failure import RemoteFailure, is_collective_error
from lightning_sync.comm.groups import Wires, agree_on_run_id, discover_topology, make_wires
from lightning_sync.comm.progress import BACKWARD, OPTIMIZER
from lightning_sync.comm.topology import Bytes
from lightning_sync.comm.worker import Executor, executor_for
from lightning_sync.compressors import Compressor, Route
from lightning_sync.nonfinite import NonFinite
from lightning_sync.reducer import Reducer
from lightning_sync.strategies.alarms import Alarms
from lightning_sync.strategies.fed import Fed
from lightning_sync.strategies.hooks import ModeHooks
from lightning_sync.strategies.keywords import meant_keywords
from lightning_sync.strategies.remarks import say_bytes
from lightning_sync.strategies.restore import as_named_now
from lightning_sync.strategies.resume import Keeper
from lightning_sync.strategies.spare import loss_of_nothing
from lightning_sync.strategies.supply import Supply, Uneven
from lightning_sync.strategies.weighing import Weighing
from lightning_sync.two_level import levels
from lightning_sync.validity import check_combination

log = logging.getLogger(__name__)

_FLAGS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")


class SyncStrategy(ModeHooks, Fed):
    """Base class of all strategies; see the subclasses for when replicas meet.

    Args:
        compressor: What is on the wire: a name (``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"powersgd"``, or one
            that another package registered), a `Compressor` with its options, or a `Route`. `None`: the precision
            plugin's, if it is a `WirePrecision`, else gradients travel as they are.
        aggregator: How the contributions become one: a name (``"mean"``, ``"weighted_mean"``, ``"sum"``, ``"adasum"``,
            ``"median"``, ``"trimmed_mean"``, ``"majority_vote"``) or an `Aggregator`. `None`: the mean.
        error_feedback: Wrap error feedback around biased compressors. False saves one float32 per element and loses
            what is not sent.
        two_level: Reduce inside each node exactly and compress only between nodes. `None`: where it saves bytes, that
            is when there are several nodes with several ranks each. Without a compressor only when asked for.
        seed: Seed of the compressors' private random numbers.
        save_local: ``"all"``: keep the state of every rank beside a checkpoint, so that a run can go on bit for bit.
            ``"consensus"``: keep only what is the same on all ranks; residuals, random generators, and what replicas
            have of their own, start afresh at a resume.
        setup_timeout: Seconds that ranks may take to find each other (30 minutes by default).
        step_timeout: Seconds from the start of one training batch to the start of the next, after which the run ends on
            all ranks with the names of those that are missing. Time spent in validation, saving or compilation on any
            rank does not count, and the first batch may take ``setup_timeout``. It is also the time after which a rank
            without any sign of life (stopped, or on a host that has gone) counts as lost.
        stacks_dir: Where every rank writes its Python stacks (``rank-N.txt``) when a rank is missing or has to be ended
            by force. `None`: ``stacks`` in the logger's directory, without a logger in ``default_root_dir``.
        non_finite: What happens when a gradient holds inf or NaN, on all ranks alike: ``"skip"`` the step, or
            ``"raise"`` `NonFiniteError`. `None`: skip with a loss scaler; raise without one, where something is
            compressed; elsewhere nothing is looked at, as in DDP. Skipping holds buckets until backward has ended.
        drift_check_every: Steps between two comparisons, bit by bit, of ranks that must be equal (100 by default; 0:
            never). Smaller finds drift sooner and costs more; each costs about 0.3 ms per MB of parameters on a CPU.
        uneven: What happens when ranks have different numbers of training batches. ``"join"``: all data is used; a rank
            that has run out takes part with weight 0, without running its training step or logging, until all are done,
            so that epochs, schedules and callbacks stay in step. ``"shortest"``: all stop where the first one does.
            `None`: join, but with manual optimisation or ``training_step(dataloader_iter)``, where that cannot be
            done, the shortest (if lengths are known).
        local_clip_norm: Clip every rank's own gradient to this global norm *before* it is reduced. Needs the whole
            gradient, so buckets are held until backward has ended. (``Trainer(gradient_clip_val)`` clips once, what
            comes out of the reduction.) `None`: no.
        **kwargs: Everything that `lightning.pytorch.strategies.DDPStrategy` accepts, and through it
            `torch.nn.parallel.DistributedDataParallel`: ``bucket_cap_mb``, ``find_unused_parameters``,
            ``static_graph``, ``gradient_as_bucket_view``, ``start_method``, ``process_group_backend`` and so on.

    Attributes:
        counters: `Counters` of the last or current `fit` on this rank.

    Raises:
        ValueError, TypeError: for a wrong name or value, at construction.
    """

    def __init__(
        self,
        compressor: Compressor | Route | str | None = None,
        aggregator: Aggregator | str | None = None,
        *,
        error_feedback: bool = True,
        two_level: bool | None = None,
        seed: int = 0,
        save_local: Literal["all", "consensus"] = "all",
        setup_timeout: float | None = None,
        step_timeout: float = 120.0,
        stacks_dir: str | Path | None = None,
        non_finite: NonFinite | None = None,
        drift_check_every: int = 100,
        uneven: Uneven = None,
        local_clip_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        owner = type(self).__name__
        kwargs = meant_keywords(type(self), kwargs)
        check_flags(owner, error_feedback=error_feedback, **{n: kwargs[n] for n in _FLAGS if n in kwargs})
        if two_level is not None:
            check_flags(owner, two_level=two_level)
        check_integer(owner, 0, seed=seed)
        check_positive(owner, bucket_cap_mb=kwargs.get("bucket_cap_mb"), local_clip_norm=local_clip_norm)
        check_seconds(owner, setup_timeout=setup_timeout, step_timeout=step_timeout)
        if setup_timeout is not None:
            if kwargs.get("timeout", default_pg_timeout) != default_pg_timeout:
                raise ValueError(f"{type(self).__name__}: setup_timeout and timeout are the same option; pass one.")
            kwargs["timeout"] = timedelta(seconds=setup_timeout)
        self.compressor = None if compressor is None else compressors.registry.build(compressor)
        self.aggregator = aggregators.registry.build("mean" if aggregator is None else aggregator)
        self.error_feedback = error_feedback
        self.two_level = two_level
        if save_local not in LOCAL:
            raise ValueError(f"{owner}(save_local={save_local!r}): expected 'all' or 'consensus'.")
        self.seed, self.local_clip_norm = seed, local_clip_norm
        self.save_local: str = save_local
        self.step_timeout = float(step_timeout)
        self.stacks_dir = stacks_dir
        self.counters = Counters()
        self._reducer: Reducer | None = None
        self._executors: list[Executor] = []
        self._keeper = Keeper(self)
        self._alarms = Alarms(self, non_finite, drift_check_every)
        self._weighing = Weighing(self)
        self._supply = Supply(self, uneven)
        super().__init__(**kwargs)

    # ---- public ------------------------------------------------------------------------------------------------------

    @property
    def effective_compressor(self) -> Compressor | Route:
        """The compressor in use: this strategy's, or the precision plugin's, or none."""
        chosen = self.compressor if self.compressor is not None else getattr(self.precision_plugin, "compressor", None)
        return compressors.Exact() if chosen is None else chosen

    def describe(self) -> dict[str, str]:
        """Mode, compressor and aggregator by name, for logs and summaries."""
        return {
            "strategy": self.mode,
            "compressor": compressors.registry.name(self.effective_compressor),
            "aggregator": aggregators.registry.name(self.aggregator),
            "precision": str(self.precision_plugin.precision),
        }

    def predicted_bytes(self, step: int | None = None) -> Bytes | None:
        """What this rank sends per step (`None` before `fit`); `step` `None`: after any warm-up of the compressor."""
        return None if self._reducer is None else self._reducer.predicted_bytes(step)

    # ---- Lightning: construction -------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:  # noqa: D102 - Lightning's
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        in_plugin = getattr(plugin, "compressor", None)
        if in_plugin is not None and self.compressor is not None:
            raise ValueError(
                f"compressor is given twice: {type(self).__name__}(compressor={self.compressor!r}) and "
                f"WirePrecision(compressor={in_plugin!r}). Leave one of them out."
            )
        self._precision_plugin = plugin
        check_combination(self.mode, self.effective_compressor, self.aggregator, self.precision_plugin.precision)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            self._launcher = _compat.PatientLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    # ---- Lightning: set-up -------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Refuse what Lightning would drop silently, then join the process group."""
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            requested = _compat.requested_precision(module.trainer)
            if requested not in ("32-true", self.precision_plugin.precision):
                raise ValueError(
                    f"Trainer(precision={requested!r}) is ignored by Lightning, because the strategy brings a "
                    f"precision plugin for {self.precision_plugin.precision!r}. Leave one of them out."
                )
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Start the watcher, take out Lightning's collectives, then set up as DDP does."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._open(trainer)
        super().setup(trainer)
        self._keeper.apply()
        self.after_setup()
        if trainer.state.fn == TrainerFn.FITTING:
            self._alarms.open()
        if self._reducer is not None:
            self._say_bytes(self._reducer)

    def _open(self, trainer: Trainer) -> None:
        self._close()
        self.counters = Counters()
        claim = getattr(self.precision_plugin, "claim", None)
        if claim is not None:
            claim()
        run = agree_on_run_id(self.root_device)
        self._keeper.open(run)
        self.start_watching(trainer, run)

    @property
    def _executor(self) -> Executor | None:
        """Where gradients are reduced."""
        return self._executors[0] if self._executors else None

    def _make_wires(self, two_level: bool | None) -> Wires:
        """Groups and the executor for reductions over all ranks (collective)."""
        topology = discover_topology(self.node_rank, self.root_device)
        two_level = levels(two_level, linear=self.aggregator.linear)
        return make_wires(topology, self.counters, self._make_executor().wait, two_level, self.group_timeout)

    def _make_executor(self, device: torch.device | None = None) -> Executor:
        """A thread (or stream) for reductions, tied to the watcher both ways."""
        assert self._watcher is not None
        if self.root_device.type == "cuda":
            self.counters.leave_phases_out()
        executor = executor_for(device or self.root_device, self.group_timeout, self._report)
        self._executors.append(executor)
        self._watcher.count_rounds(lambda: sum(e.rounds for e in self._executors))
        self._watcher.on_failure(executor.abort)
        return executor

    def _report(self, error: BaseException, where: str) -> None:
        """Tell the other ranks what failed here, unless it only shows that something failed there."""
        if self._watcher is None:
            return
        if is_collective_error(error):
            self._watcher.explain(error, where)
        else:
            self._watcher.report_failure(error, where)

    def _say_bytes(self, reducer: Reducer, per: str = "step") -> None:
        say_bytes(reducer, self.mode, self.describe()["compressor"], per)

    # ---- Lightning: training -----------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the mode that a batch begins."""
        self._alarms.begin_batch()
        self.begin_batch()
        super().on_train_batch_start(batch, batch_idx)

    def spare_step(self) -> Tensor:
        """A loss without effect; it touches all parameters where nobody asks which have gradients."""
        asked = self.root_device.type == "cpu" or self._ddp_kwargs.get("find_unused_parameters", False)
        trained = [] if asked or self.model is None else [p for p in self.model.parameters() if p.requires_grad]
        return loss_of_nothing(trained, self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's, with `after_backward` where gradients are complete and nobody has looked at them yet."""
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        self._at(BACKWARD)
        closure_loss = self._weighing.scale(closure_loss)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        try:
            self.before_backward()
            with self._weighing.silencing():
                self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            self.after_backward()
        except RuntimeError as error:
            self._blame(error)
            raise
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        self._at(OPTIMIZER)
        return closure_loss

    def check_jobs(self, executor: Executor) -> None:
        """Raise what a job of the communication thread ran into, or the failure of another rank behind it."""
        try:
            executor.check()
        except RuntimeError as error:
            self._blame(error)
            raise

    def _blame(self, error: RuntimeError) -> None:
        """Raise another rank's failure in place of what it looks like from here, such as a closed connection."""
        if self._watcher is None:
            return
        self._watcher.check()
        if is_collective_error(error):
            raise self._watcher.explain(error, "backward") from error

    def on_train_end(self) -> None:
        """Hear how the last comparison of ranks went."""
        super().on_train_end()
        self._alarms.finish()

    # ---- Lightning: checkpoints --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the state of every rank beside the checkpoint (all ranks), and the checkpoint itself (rank 0)."""

        def write() -> None:
            super(SyncStrategy, self).save_checkpoint(checkpoint, filepath, storage_options)

        with self._saving():
            self._keeper.save(checkpoint, os.fspath(filepath), write)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the checkpoint, and check what lies beside it; it is applied once the reducer exists."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._keeper.find(checkpoint, os.fspath(checkpoint_path))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As Lightning's, for a model of which other parts were compiled, too."""
        module = self.lightning_module
        assert module is not None
        named = as_named_now(checkpoint["state_dict"], module)
        super().load_model_state_dict({**checkpoint, "state_dict": named}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As Lightning's, then what Lightning keeps for rank 0 only."""
        super().load_optimizer_state_dict(checkpoint)
        self._keeper.finish()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint, and what lies beside it."""
        super().remove_checkpoint(filepath)
        self._keeper.remove(os.fspath(filepath))

    # ---- Lightning: the end ------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, or learn from them (no collective: this may run on one rank only)."""
        super().on_exception(exception)
        if isinstance(exception, _compat.SIGTERMException) and self.world_size == 1:
            self.save_alone()
        if self._watcher is None or isinstance(exception, (_compat.SIGTERMException, RemoteFailure)):
            return
        if not is_collective_error(exception):
            self._watcher.report_failure(exception, "training")
            return
        failure = self._watcher.explain(exception, "training")
        if failure.rank != self.global_rank and exception.__cause__ is None:
            exception.__cause__ = failure  # Lightning raises `exception` again; its traceback starts with the reason

    def teardown(self) -> None:
        """Stop the threads; no collective, since an exception may have led here."""
        self._keeper.close()
        self._close()
        super().teardown()

    def _close(self) -> None:
        broken = any(executor.error is not None for executor in self._executors)
        for executor in self._executors:
            executor.close()
        self._executors = []
        if self._watcher is not None:
            broken = broken or self._watcher.failure is not None
        self.stop_watching()
        self._alarms.close(broken=broken)
        self._supply.close(self.attached_trainer(), broken=broken)
        if self._reducer is not None:
            for wires in self._all_wires():
                if broken:
                    # Their threads may still sit in a collective, for which a destructor would wait.
                    wires.abandon()
                elif dist.is_initialized():
                    wires.close()
            self._reducer = None

    def _all_wires(self) -> list[Wires]:
        """The wires to give back at the end."""
        return [] if self._reducer is None else [self._reducer.wires]
