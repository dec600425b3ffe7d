"""Precision plugins that carry the wire format beside the compute precision."""

from lightning_sync.precision.wire import WirePrecision, loss_scale_of

__all__ = ["WirePrecision", "loss_scale_of"]
