"""HOW N contributions become one."""

from lightning_sync.aggregators.adasum import Adasum
from lightning_sync.aggregators.base import Aggregator, ParameterAggregator, estimates, takes_part
from lightning_sync.aggregators.mean import Mean, Sum
from lightning_sync.aggregators.robust import MajorityVote, Median, TrimmedMean
from lightning_sync.aggregators.weighted_mean import WeightedMean, is_weighted
from lightning_sync.registry import Registry

registry: Registry[Aggregator] = Registry(
    "aggregator",
    {
        "mean": Mean,
        "weighted_mean": WeightedMean,
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
    "WeightedMean",
    "estimates",
    "is_weighted",
    "registry",
    "takes_part",
]
