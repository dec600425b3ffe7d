"""Lightning strategies and precision plugins for every way of synchronising data-parallel training.

Importing the package registers its strategies by name, so that ``Trainer(strategy="strict")`` works. It starts nothing.
"""

from lightning_sync.aggregators import (
    Adasum,
    Aggregator,
    MajorityVote,
    Mean,
    Median,
    ParameterAggregator,
    Sum,
    TrimmedMean,
    WeightedMean,
)
from lightning_sync.asynchronous.rules import (
    Add,
    DelayCompensated,
    DelayedNesterov,
    Elastic,
    InverseStaleness,
    Quorum,
    Rule,
)
from lightning_sync.cluster import newest_checkpoint
from lightning_sync.compressors import (
    BF16,
    FP8,
    FP16,
    QSGD,
    AcpSGD,
    BlockInt4,
    BlockInt8,
    ChunkTopK,
    Compressor,
    ErrorFeedback,
    Exact,
    LocalClipping,
    MomentumCorrection,
    PowerSGD,
    RandomBlock,
    RatioWarmup,
    Route,
    Schedule,
    Sign,
    SignVote,
    Where,
)
from lightning_sync.drift import DriftError
from lightning_sync.monitor.callback import SyncMonitor
from lightning_sync.monitor.probe import Probe
from lightning_sync.nonfinite import NonFiniteError
from lightning_sync.periodic.outer import Nesterov, SlowMo
from lightning_sync.periodic.period import Growing, Period, QuadraticRule, Seconds
from lightning_sync.precision import WirePrecision
from lightning_sync.sampler import SharedSampler
from lightning_sync.strategies import (
    AsyncStrategy,
    DelayedStrategy,
    HybridStrategy,
    StrictStrategy,
    UnwrappedStrategy,
    register,
    strategy,
)

__version__ = "0.1.0"

register()

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "QSGD",
    "AcpSGD",
    "Adasum",
    "Add",
    "Aggregator",
    "AsyncStrategy",
    "BlockInt4",
    "BlockInt8",
    "ChunkTopK",
    "Compressor",
    "DelayCompensated",
    "DelayedNesterov",
    "DelayedStrategy",
    "DriftError",
    "Elastic",
    "ErrorFeedback",
    "Exact",
    "Growing",
    "HybridStrategy",
    "InverseStaleness",
    "LocalClipping",
    "MajorityVote",
    "Mean",
    "Median",
    "MomentumCorrection",
    "Nesterov",
    "NonFiniteError",
    "ParameterAggregator",
    "Period",
    "PowerSGD",
    "Probe",
    "QuadraticRule",
    "Quorum",
    "RandomBlock",
    "RatioWarmup",
    "Route",
    "Rule",
    "Schedule",
    "Seconds",
    "SharedSampler",
    "Sign",
    "SignVote",
    "SlowMo",
    "StrictStrategy",
    "Sum",
    "SyncMonitor",
    "TrimmedMean",
    "UnwrappedStrategy",
    "WeightedMean",
    "Where",
    "WirePrecision",
    "newest_checkpoint",
    "strategy",
]
