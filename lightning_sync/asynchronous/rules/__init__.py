"""Rules by which a shard answers contributions, and their names."""

from __future__ import annotations

from lightning_sync.asynchronous.rules.additive import Add, InverseStaleness
from lightning_sync.asynchronous.rules.base import Contribution, Facts, Rule
from lightning_sync.asynchronous.rules.compensated import DelayCompensated
from lightning_sync.asynchronous.rules.elastic import Elastic
from lightning_sync.asynchronous.rules.nesterov import DelayedNesterov
from lightning_sync.asynchronous.rules.quorum import Quorum
from lightning_sync.registry import Registry

RULES: Registry[Rule] = Registry(
    "rule",
    {
        "add": Add,
        "inverse_staleness": InverseStaleness,
        "delay_compensated": DelayCompensated,
        "elastic": Elastic,
        "delayed_nesterov": DelayedNesterov,
        "quorum": Quorum,
    },
    (Rule,),
)

__all__ = [
    "RULES",
    "Add",
    "Contribution",
    "DelayCompensated",
    "DelayedNesterov",
    "Elastic",
    "Facts",
    "InverseStaleness",
    "Quorum",
    "Rule",
]
