"""WHEN replicas meet: Lightning strategies, and the names under which `Trainer(strategy=...)` finds them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_sync.asynchronous.rules import DelayedNesterov, Quorum
from lightning_sync.periodic.outer import Nesterov, SlowMo
from lightning_sync.strategies.asynchronous import AsyncStrategy
from lightning_sync.strategies.base import SyncStrategy
from lightning_sync.strategies.delayed import DelayedStrategy
from lightning_sync.strategies.hybrid import HybridStrategy
from lightning_sync.strategies.strict import StrictStrategy
from lightning_sync.strategies.unwrapped import UnwrappedStrategy

#: Name -> class and arguments. A name is an entry, not a class: several may share one.
NAMES: dict[str, tuple[type[SyncStrategy], dict[str, Any]]] = {
    "strict": (StrictStrategy, {}),
    "hybrid": (HybridStrategy, {}),
    "local_sgd": (HybridStrategy, {"sync_every": 8}),
    "post_local_sgd": (HybridStrategy, {"sync_every": 8, "warmup_steps": 300}),
    "hierarchical": (HybridStrategy, {"sync_every": 8, "replica": "node"}),
    "diloco": (HybridStrategy, {"sync_every": 64, "outer_optimizer": Nesterov(), "warmup_steps": 300}),
    "streaming_diloco": (
        HybridStrategy,
        {
            "sync_every": 64,
            "outer_optimizer": Nesterov(),
            "warmup_steps": 300,
            "fragments": 4,
            "overlap_steps": 6,
            "local_weight": 0.5,
        },
    ),
    "slowmo": (HybridStrategy, {"sync_every": 12, "outer_optimizer": SlowMo()}),
    "delayed": (DelayedStrategy, {}),
    "easgd": (HybridStrategy, {"sync_every": 10, "elastic": 0.9}),
    "async": (AsyncStrategy, {}),
    "asynchronous": (AsyncStrategy, {}),
    "ssp": (AsyncStrategy, {"max_staleness": 4}),
    "async_diloco": (
        AsyncStrategy,
        {"sync_every": 64, "rule": DelayedNesterov(period=None), "warmup_steps": 300},
    ),
    "decoupled_diloco": (
        AsyncStrategy,
        {"sync_every": 64, "rule": Quorum(), "outer_optimizer": Nesterov(), "warmup_steps": 300},
    ),
}


def register() -> None:
    """Enter all names into Lightning's registry; an entry of somebody else is left alone."""
    for name, (cls, arguments) in NAMES.items():
        if name not in StrategyRegistry:
            description = (cls.__doc__ or name).strip().splitlines()[0]
            StrategyRegistry.register(name, cls, description=description, **arguments)


def strategy(name: str, **options: Any) -> SyncStrategy:
    """Make a strategy by name, with options: ``ls.strategy("strict", compressor="int8", bucket_cap_mb=5)``.

    Args:
        name: One of the registered names.
        **options: The strategy's own arguments; they override what the name stands for.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"strategy={name!r}: expected one of {', '.join(NAMES)}.")
    cls, arguments = NAMES[name]
    return cls(**{**arguments, **options})


__all__ = [
    "NAMES",
    "AsyncStrategy",
    "DelayedStrategy",
    "HybridStrategy",
    "StrictStrategy",
    "SyncStrategy",
    "UnwrappedStrategy",
    "register",
    "strategy",
]
