"""What was sent and how long it took, counted where the bytes are handed over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from lightning_sync.comm.spans import span
from lightning_sync.comm.topology import Bytes

Phase = Literal["encode", "wire", "decode"]


@dataclass
class Counters:
    """Totals of one rank since the start of `fit`.

    Attributes:
        steps: Steps whose gradients were reduced, skipped ones included.
        skipped_steps: Of these, steps that changed nothing, because a gradient was not finite.
        exchanges: Exchanges between replicas that took effect, in modes that do not meet in every step.
        collectives: Collectives issued for reductions.
        messages: Messages these sent to other nodes (each costs some 100 bytes of headers on top).
        payload_bytes: Bytes handed to them.
        sent: Bytes sent to other ranks, exactly: the payload times the collective's factor.
        dense: What ring all-reduces of the uncompressed gradients would have sent.
        wait_seconds: Time the training thread stood still, waiting for a reduction to end; `None` where it is torch
            that waits and nothing can be measured (strict without a compressor).
        encode_seconds: Time spent on making what is sent, up to the first payload of each reduction.
        wire_seconds: Time in which reductions stood still until a collective was done. What was encoded or decoded
            while a collective travelled is not in it.
        decode_seconds: Time spent on what has come: decoding, combining, and encoding again for a further round.

    The last three add up to the time that reductions take; `wait_seconds` is the part of it that training stood still
    for, so that the rest was overlapped. They are `None` on CUDA, where the host only issues work.
    """

    steps: int = 0
    exchanges: int = 0
    skipped_steps: int = 0
    collectives: int = 0
    messages: int = 0
    payload_bytes: int = 0
    sent: Bytes = field(default_factory=Bytes)
    dense: Bytes = field(default_factory=Bytes)
    wait_seconds: float | None = 0.0
    encode_seconds: float | None = 0.0
    wire_seconds: float | None = 0.0
    decode_seconds: float | None = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        # A strategy is pickled when Lightning spawns its ranks; a lock cannot be.
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def state_dict(self) -> dict[str, int | float | list[int] | None]:
        """All totals as numbers, and lists of numbers for fractions."""
        state: dict[str, int | float | list[int] | None] = {}
        for name, value in self.__getstate__().items():
            if isinstance(value, Bytes):
                parts = (Fraction(value.sent), Fraction(value.network))
                state[name] = [n for part in parts for n in (part.numerator, part.denominator)]
            else:
                state[name] = value  # type: ignore[assignment]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` returned; a time that cannot be measured here stays `None`."""
        for name, value in state.items():
            if isinstance(getattr(self, name), Bytes):
                setattr(self, name, Bytes(Fraction(*value[:2]), Fraction(*value[2:])))
            elif not name.endswith("_seconds") or getattr(self, name) is not None:
                setattr(self, name, value or 0)

    def count(self, payload: int, sent: Bytes, messages: int = 0) -> None:
        """Add one collective (any thread)."""
        with self._lock:
            self.collectives += 1
            self.messages += messages
            self.payload_bytes += payload
            self.sent += sent

    def count_dense(self, sent: Bytes) -> None:
        """Add what the uncompressed gradients of one bucket would have cost."""
        with self._lock:
            self.dense += sent

    @property
    def wire_bytes(self) -> int:
        """Whole bytes sent to other ranks."""
        return round(self.sent.sent)

    @property
    def network_bytes(self) -> int:
        """Whole bytes sent to other nodes."""
        return round(self.sent.network)

    @property
    def dense_bytes(self) -> int:
        """Whole bytes that the uncompressed gradients would have cost."""
        return round(self.dense.sent)

    def waited(self) -> float:
        """`wait_seconds` as a number: 0 where nothing can be measured."""
        return self.wait_seconds or 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time spent inside to `wait_seconds`."""
        start = time.perf_counter()
        try:
            with span("wait"):
                yield
        finally:
            self.wait_seconds = (self.wait_seconds or 0.0) + time.perf_counter() - start

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time spent inside to ``encode_seconds``, ``wire_seconds`` or ``decode_seconds`` (any thread)."""
        start = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            seconds, field_name = time.perf_counter() - start, f"{name}_seconds"
            with self._lock:
                total = getattr(self, field_name)
                if total is not None:
                    setattr(self, field_name, total + seconds)

    def leave_phases_out(self) -> None:
        """Measure no phases: for devices on which the host only issues work."""
        self.encode_seconds = self.wire_seconds = self.decode_seconds = None

    @property
    def compression_ratio(self) -> float | None:
        """Dense bytes over sent bytes, between nodes where there are several; `None` while nothing has been sent."""
        if self.sent.network:
            return float(self.dense.network / self.sent.network)
        return float(self.dense.sent / self.sent.sent) if self.sent.sent else None
