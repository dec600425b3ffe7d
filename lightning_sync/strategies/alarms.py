"""What a strategy looks at beside failures: gradients that are not finite, and replicas that are no longer equal."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sync.checks import check_integer
from lightning_sync.ddp_hook import param_specs
from lightning_sync.drift import DriftAlarm
from lightning_sync.nonfinite import GradientCheck, NonFinite, Skips, check_non_finite
from lightning_sync.precision import loss_scale_of
from lightning_sync.state import canonical_name

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_sync.strategies.base import SyncStrategy


class Alarms:
    """The part of a strategy that looks at numbers.

    Args:
        strategy: The strategy it belongs to.
        non_finite: See `SyncStrategy`.
        drift_check_every: See `SyncStrategy`.
    """

    def __init__(self, strategy: SyncStrategy, non_finite: NonFinite | None, drift_check_every: int) -> None:
        owner = type(strategy).__name__
        check_non_finite(owner, non_finite)
        check_integer(owner, 0, drift_check_every=drift_check_every)
        self._strategy = strategy
        self._given = non_finite
        self._every = drift_check_every
        self._drift: DriftAlarm | None = None
        self._checked = 0
        self._gradients: GradientCheck | None = None
        self._handed_over = False

    @property
    def non_finite(self) -> NonFinite | None:
        """What was asked for, here or in the precision plugin."""
        in_plugin: NonFinite | None = getattr(self._strategy.precision_plugin, "non_finite", None)
        if self._given is not None and in_plugin is not None:
            raise ValueError(
                f"non_finite is given twice: {type(self._strategy).__name__}(non_finite={self._given!r}) and "
                f"WirePrecision(non_finite={in_plugin!r}). Leave one of them out."
            )
        return self._given if self._given is not None else in_plugin

    def hand_over(self) -> NonFinite | None:
        """Let a communication hook look at gradients, before they are reduced; says what it shall do."""
        self._handed_over = True
        return self.non_finite

    def open(self) -> None:
        """Begin a fit, once reducer and optimisers exist (collective).

        Raises:
            ValueError: where steps cannot be skipped.
        """
        strategy, non_finite = self._strategy, self.non_finite
        scaled = loss_scale_of(strategy.precision_plugin) is not None
        if non_finite == "skip" and not scaled and any(isinstance(o, torch.optim.LBFGS) for o in strategy.optimizers):
            raise ValueError(
                "non_finite='skip' with LBFGS: it takes gradients that are None for zeros, and so for a minimum. Use "
                "another optimiser, or non_finite='raise'."
            )
        self._gradients = None
        if non_finite is not None and not self._handed_over and not (non_finite == "skip" and scaled):
            module = strategy.lightning_module
            assert module is not None
            named = [(spec.name, p) for spec, p in param_specs(module) if spec.name not in self._ignored()]
            leaders, rank = strategy.leaders(), strategy.global_rank
            replica = [r for r, first in enumerate(leaders) if first == leaders[rank]]
            skips = Skips(
                strategy.counters,
                speaks=replica[0] == rank,
                ranks=None if len(replica) == len(leaders) else replica,
            )
            self._gradients = GradientCheck(named, non_finite, skips)
        self._open_drift()

    def _open_drift(self) -> None:
        """Make the groups (collective), if there are ranks that must be equal."""
        strategy = self._strategy
        leaders = strategy.leaders()
        replicas = [[r for r, first in enumerate(leaders) if first == leader] for leader in sorted(set(leaders))]
        replicas = [ranks for ranks in replicas if len(ranks) > 1]
        if not self._every or not replicas:
            return
        if strategy._ddp_comm_hook is not None:
            rank_zero_info("The drift alarm is off: only the author of ddp_comm_hook knows whether ranks stay equal.")
            return
        if not dist.is_gloo_available():
            rank_zero_info("The drift alarm is off: it needs gloo, which this build of torch lacks.")
            return
        self._checked = strategy.counters.steps
        for ranks in replicas:  # every rank takes part in the creation of every group
            group = dist.new_group(ranks, timedelta(seconds=strategy.group_timeout), backend="gloo")
            if strategy.global_rank in ranks:
                self._drift = DriftAlarm(self._equal_tensors(), ranks, group)

    def _equal_tensors(self) -> list[tuple[str, Tensor]]:
        """What must be equal on all ranks of a replica when a batch begins.

        Not buffers under DDP: there each rank's own forward has changed them (BatchNorm), and rank 0's replace them
        before the next one begins.
        """
        module, ignored = self._strategy.lightning_module, self._ignored()
        assert module is not None
        named: list[tuple[str, Tensor]] = list(module.named_parameters())
        if self._strategy.equal_buffers:
            named += module.named_buffers()
        found = [(canonical_name(name), t) for name, t in named if t.layout == torch.strided]
        return [(name, t) for name, t in found if name not in ignored]

    def _ignored(self) -> set[str]:
        """What DDP was told to leave alone."""
        return {canonical_name(name) for name in getattr(self._strategy.model, "parameters_to_ignore", ())}

    def begin_batch(self) -> None:
        """Between two batches: hear how the last comparison went, and begin one if it is time.

        Raises:
            DriftError: on all ranks of a replica that is no longer one.
        """
        steps = self._strategy.counters.steps
        if self._drift is None or steps == self._checked:
            return
        self._settle(self._drift)
        self._checked = steps
        if steps % self._every == 0:
            self._drift.begin(steps)

    def check_gradients(self, step: int) -> None:
        """Look at gradients that were averaged, if asked for, before anybody uses them.

        Args:
            step: The step they belong to, from 0.

        Raises:
            NonFiniteError: see `GradientCheck`.
        """
        if self._gradients is not None:
            self._gradients(step)

    def finish(self) -> None:
        """Hear how the last comparison went, at the end of training."""
        if self._drift is not None:
            self._settle(self._drift)

    def close(self, *, broken: bool) -> None:
        """End the thread (no collective)."""
        self._handed_over = False
        if self._drift is not None:
            self._drift.close(broken=broken)
            self._drift = None

    def _settle(self, drift: DriftAlarm) -> None:
        watcher = self._strategy._watcher
        drift.settle(watcher.check if watcher is not None else lambda: None)
