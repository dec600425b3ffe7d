"""Precision plugins that carry what is on the wire beside what is computed in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sync.checks import check_seconds
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import discover_topology, make_wires
from lightning_sync.comm.worker import executor_for
from lightning_sync.compressors import Compressor, Route, registry
from lightning_sync.compressors.resolve import is_exact, to_route
from lightning_sync.ddp_hook import CommHook, param_specs
from lightning_sync.nonfinite import NonFinite, check_non_finite
from lightning_sync.reducer import Reducer

if TYPE_CHECKING:
    from lightning_sync.strategies.stock import StockKeeper

log = logging.getLogger(__name__)

PrecisionName = Literal["32-true", "64-true", "16-true", "bf16-true", "bf16-mixed", "16-mixed"]


def loss_scale_of(plugin: Precision) -> Callable[[], float] | None:
    """Reads the current loss scale of a precision plugin; `None` if it does not scale the loss."""
    scaler = getattr(plugin, "scaler", None)
    return None if scaler is None else scaler.get_scale


class WirePrecision(Precision):
    """A Precision plugin with a wire format: ``plugins=[WirePrecision("bf16-mixed", compressor="int8")]``.

    Computes exactly as Lightning's own plugin for that precision does, and is an instance of it. A strategy of this
    package takes the compressor from here. Under Lightning's `DDPStrategy` it registers the communication hook itself,
    on every device. With a single device nothing is sent, and it says so in the log.

    Args:
        precision: As in `Trainer(precision=...)`: ``"32-true"``, ``"64-true"``, ``"16-true"``, ``"bf16-true"``,
            ``"bf16-mixed"`` or ``"16-mixed"``.
        compressor: A name, a `Compressor` or a `Route`; `None` sends gradients as they are.
        device: Device type for mixed precision; by default ``"cuda"`` where there is one, else ``"cpu"``.
        scaler: Loss scaler for ``"16-mixed"``; a new `torch.amp.GradScaler` by default.
        step_timeout: Seconds one collective may take, under Lightning's `DDPStrategy`; a strategy of this package has
            its own.
        non_finite: ``"skip"`` or ``"raise"``: what happens to a step whose gradient holds inf or NaN, as in
            `SyncStrategy`. `None`: skip with a loss scaler, raise without.

    Raises:
        ValueError: for an unknown precision or compressor, or a scaler where none is used.
    """

    # The whole signature, though only `precision` is used: a command line reads the arguments from here.
    def __new__(  # noqa: D102
        cls,
        precision: PrecisionName,
        compressor: Compressor | Route | str | None = None,
        *,
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        step_timeout: float = 120.0,
        non_finite: NonFinite | None = None,
    ) -> WirePrecision:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"WirePrecision(precision={precision!r}): expected one of {', '.join(get_args(PrecisionName))}."
            )
        return super().__new__(_CLASSES[precision] if cls is WirePrecision else cls)

    def __init__(
        self,
        precision: PrecisionName,
        compressor: Compressor | Route | str | None = None,
        *,
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        step_timeout: float = 120.0,
        non_finite: NonFinite | None = None,
    ) -> None:
        self.compressor = None if compressor is None else registry.build(compressor)
        check_seconds("WirePrecision", step_timeout=step_timeout)
        check_non_finite("WirePrecision", non_finite)
        self.non_finite: NonFinite | None = non_finite
        self.step_timeout = float(step_timeout)
        self.claimed = False
        self.hook: CommHook | None = None
        self._keeper: StockKeeper | None = None
        self.counters = Counters()
        self._init_stock(precision, device or ("cuda" if torch.cuda.is_available() else "cpu"), scaler)

    def _init_stock(self, precision: str, device: str, scaler: torch.amp.GradScaler | None) -> None:
        """Initialise the plugin this one stands for."""
        if scaler is not None:
            raise ValueError(f"WirePrecision({precision!r}, scaler=...): only '16-mixed' scales the loss.")

    def claim(self) -> Compressor | Route | None:
        """Hand the compressor to a strategy, which then does the reductions."""
        self.claimed = True
        return self.compressor

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Register the communication hook, if this runs under Lightning's own DDPStrategy."""
        if not self.claimed and optimizers:
            if not is_exact(self.compressor):
                self._register(model)
            elif self.non_finite is not None:
                raise ValueError(
                    f"WirePrecision(non_finite={self.non_finite!r}): without a compressor this plugin does not see "
                    "gradients under Lightning's own strategies. Use strategy='strict', or leave it out."
                )
        return super().connect(model, optimizers, lr_schedulers)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward, then raise what a reduction raised before its gradients are used."""
        super().backward(tensor, model, optimizer, *args, **kwargs)
        if self.hook is not None:
            self.hook.check()

    def teardown(self) -> None:
        """End the communication thread."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self.hook is not None:
            self.hook.close()
            if self.hook.executor.error is None and torch.distributed.is_initialized():
                self.hook.reducer.wires.close()
            self.hook = None
        self.claimed = False
        super().teardown()

    def __repr__(self) -> str:
        return f"WirePrecision({self.precision!r}, compressor={self.compressor!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses carry the stock plugins' names (see below), under which pickle would find the stock plugins.
        return _restore, (self.precision, self.__dict__)

    def _register(self, model: nn.Module) -> None:
        assert self.compressor is not None
        if not isinstance(model, DistributedDataParallel):
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                raise ValueError(
                    f"WirePrecision(compressor={self.compressor!r}) needs DDPStrategy or a strategy of lightning_sync, "
                    f"but the model is a {type(model).__name__} that is not wrapped in DDP."
                )
            log.info("One device: WirePrecision sends nothing, compressor=%r is bypassed.", self.compressor)
            return
        self._keeper = _keeper(model.module, self.compressor, self.counters)
        device = next(model.parameters()).device
        executor = executor_for(device, self.step_timeout)
        if device.type == "cuda":
            self.counters.leave_phases_out()
        node = _node_rank(model.module)
        wires = make_wires(discover_topology(node, device), self.counters, executor.wait, timeout=self.step_timeout)
        reducer = Reducer([spec for spec, _ in param_specs(model.module)], to_route(self.compressor), wires)
        self.hook = CommHook(model, reducer, executor, self.counters, loss_scale_of(self), self.non_finite)
        if self._keeper is not None:
            self._keeper.apply(reducer)


class _WireFull(WirePrecision):
    """32-true."""


class _WireDouble(WirePrecision, DoublePrecision):
    """64-true."""


class _WireHalf(WirePrecision, HalfPrecision):
    """16-true and bf16-true."""

    def _init_stock(self, precision: str, device: str, scaler: torch.amp.GradScaler | None) -> None:
        super()._init_stock(precision, device, scaler)
        HalfPrecision.__init__(self, precision)  # type: ignore[arg-type]


class _WireMixed(WirePrecision, MixedPrecision):
    """bf16-mixed and 16-mixed."""

    def _init_stock(self, precision: str, device: str, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and precision != "16-mixed":
            super()._init_stock(precision, device, scaler)
        MixedPrecision.__init__(self, precision, device, scaler)  # type: ignore[arg-type]


_CLASSES: dict[str, type[WirePrecision]] = {
    "32-true": _WireFull,
    "64-true": _WireDouble,
    "16-true": _WireHalf,
    "bf16-true": _WireHalf,
    "bf16-mixed": _WireMixed,
    "16-mixed": _WireMixed,
}
# Lightning files a plugin's state in the checkpoint under its class name: with the stock name, a run may switch between
# this plugin and Lightning's own and keep its loss scale.
for _wire, _stock in (
    (_WireFull, Precision),
    (_WireDouble, DoublePrecision),
    (_WireHalf, HalfPrecision),
    (_WireMixed, MixedPrecision),
):
    _wire.__qualname__ = _stock.__qualname__


def _restore(precision: str, attributes: dict[str, Any]) -> WirePrecision:
    plugin = object.__new__(_CLASSES[precision])
    plugin.__dict__.update(attributes)
    return plugin


def _keeper(module: nn.Module, compressor: Compressor | Route, counters: Counters) -> StockKeeper | None:
    """What saves residuals and factors beside the checkpoints of a strategy that does not know of them."""
    # Strategies import this module.
    from lightning_sync.strategies.stock import StockKeeper

    trainer = getattr(module, "_trainer", None)
    if trainer is None or not isinstance(trainer.strategy, DDPStrategy):
        return None
    keeper = StockKeeper(trainer.strategy, compressor, counters)
    keeper.open()
    return keeper


def _node_rank(module: nn.Module) -> int:
    trainer = getattr(module, "_trainer", None)
    return int(trainer.node_rank) if trainer is not None else 0
