"""WHAT is on the wire: compressors, error feedback, and the rules that assign them to parameters."""

from lightning_sync.compressors.acp import AcpSGD
from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.blocks import BlockCodec
from lightning_sync.compressors.cast import BF16, FP16
from lightning_sync.compressors.dgc import LocalClipping, MomentumCorrection, RatioWarmup, dgc
from lightning_sync.compressors.exact import Exact
from lightning_sync.compressors.feedback import ErrorFeedback
from lightning_sync.compressors.fp8 import FP8
from lightning_sync.compressors.fused import FusedCodec
from lightning_sync.compressors.integers import BlockInt4, BlockInt8
from lightning_sync.compressors.plain import PlainBlocks
from lightning_sync.compressors.powersgd import PowerSGD
from lightning_sync.compressors.qsgd import QSGD
from lightning_sync.compressors.randomblock import RandomBlock
from lightning_sync.compressors.route import Route, Where, as_route
from lightning_sync.compressors.schedule import Schedule
from lightning_sync.compressors.sign import Sign, SignVote
from lightning_sync.compressors.topk import ChunkTopK
from lightning_sync.registry import Registry

registry: Registry[Compressor | Route] = Registry(
    "compressor",
    {
        "none": Exact,
        "bf16": BF16,
        "fp16": FP16,
        "fp8": FP8,
        "int8": BlockInt8,
        "int4": BlockInt4,
        "sign": Sign,
        "sign_vote": SignVote,
        "qsgd": QSGD,
        "powersgd": PowerSGD,
        "acp": AcpSGD,
        "topk": ChunkTopK,
        "random_block": RandomBlock,
        "dgc": dgc,
    },
    accepts=(Compressor, Route),
)

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "QSGD",
    "AcpSGD",
    "BlockCodec",
    "BlockInt4",
    "BlockInt8",
    "ChunkTopK",
    "Compressor",
    "ErrorFeedback",
    "Exact",
    "FusedCodec",
    "LocalClipping",
    "MomentumCorrection",
    "Payload",
    "PlainBlocks",
    "PowerSGD",
    "RandomBlock",
    "RatioWarmup",
    "Reduction",
    "Route",
    "Schedule",
    "Sign",
    "SignVote",
    "Where",
    "as_route",
    "dgc",
    "registry",
]
