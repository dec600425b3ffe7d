"""What was sent and how long it took, counted where the bytes are handed over."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from lightning_sync.comm.topology import Bytes


@dataclass
class Counters:
    """Totals of one rank since the start of `fit`.

    Attributes:
        steps: Steps whose gradients were reduced.
        messages: Collectives issued for reductions.
        payload_bytes: Bytes handed to them.
        wire_bytes: Bytes sent to other ranks: the payload times the collective's factor.
        network_bytes: Of these, bytes sent to other nodes.
        dense_bytes: What a ring all-reduce of the uncompressed gradients would have sent.
        wait_seconds: Time the training thread stood still, waiting for a reduction to end.
    """

    steps: int = 0
    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    network_bytes: float = 0.0
    dense_bytes: float = 0.0
    wait_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, payload: int, sent: Bytes) -> None:
        """Add one collective (any thread)."""
        with self._lock:
            self.messages += 1
            self.payload_bytes += payload
            self.wire_bytes += sent.sent
            self.network_bytes += sent.network

    @property
    def compression_ratio(self) -> float | None:
        """Dense bytes over sent bytes; `None` while nothing has been sent."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else None
