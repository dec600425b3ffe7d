"""HOW N contributions become one."""

from lightning_sync.aggregators.base import Aggregator
from lightning_sync.aggregators.mean import Mean
from lightning_sync.registry import Registry

registry: Registry[Aggregator] = Registry("aggregator", {"mean": Mean}, accepts=(Aggregator,))

__all__ = ["Aggregator", "Mean", "registry"]
