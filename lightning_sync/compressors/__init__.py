"""WHAT is on the wire: compressors, error feedback, and the rules that assign them to parameters."""

from lightning_sync.compressors.base import Compressor, Payload, Reduction
from lightning_sync.compressors.blocks import BlockCodec
from lightning_sync.compressors.cast import BF16, FP16
from lightning_sync.compressors.exact import Exact
from lightning_sync.compressors.feedback import ErrorFeedback
from lightning_sync.compressors.int8 import BlockInt8
from lightning_sync.compressors.plain import PlainBlocks
from lightning_sync.compressors.powersgd import PowerSGD
from lightning_sync.compressors.route import Route, as_route
from lightning_sync.registry import Registry

registry: Registry[Compressor | Route] = Registry(
    "compressor",
    {"none": Exact, "bf16": BF16, "fp16": FP16, "int8": BlockInt8, "powersgd": PowerSGD},
    accepts=(Compressor, Route),
)

__all__ = [
    "BF16",
    "FP16",
    "BlockCodec",
    "BlockInt8",
    "Compressor",
    "ErrorFeedback",
    "Exact",
    "Payload",
    "PlainBlocks",
    "PowerSGD",
    "Reduction",
    "Route",
    "as_route",
    "registry",
]
