"""HOW N contributions become one."""

from lightning_sync.aggregators.adasum import Adasum
from lightning_sync.aggregators.base import Aggregator, ParameterAggregator, estimates, takes_part
from lightning_sync.aggregators.mean import Mean, Sum
from lightning_sync.aggregators.robust import MajorityVote, Median, TrimmedMean
from lightning_sync.registry import Registry

registry: Registry[Aggregator] = Registry(
    "aggregator",
    {
        "mean": Mean,
        "sum": Sum,
        "adasum": Adasum,
        "median": Median,
        "trimmed_mean": TrimmedMean,
        "majority_vote": MajorityVote,
    },
    accepts=(Aggregator,),
)

__all__ = [
    "Adasum",
    "Aggregator",
    "MajorityVote",
    "Mean",
    "Median",
    "ParameterAggregator",
    "Sum",
    "TrimmedMean",
    "estimates",
    "registry",
    "takes_part",
]
