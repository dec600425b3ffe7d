"""A client: a thread that takes contributions to all owners and brings back what they hold."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sync.asynchronous.codec import EXACT, Codec, as_bytes
from lightning_sync.asynchronous.layout import FlatLayout
from lightning_sync.asynchronous.owner import ANSWER, EXCHANGE, MEET, count_letter, parse_answer
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.mail import Box, Letter, Lines, Run, start_thread
from lightning_sync.comm.topology import Topology
from lightning_sync.nonfinite import NonFiniteError


@dataclass
class Errand:
    """One round trip to all owners.

    Attributes:
        values: The contribution, float32 `[size]`, or `None` to read only. It must not change until `done`.
        sequence: Its number, the same for all owners.
        clock: The replica's clock, which is the number of the update.
        need: The clock that everybody's updates in the answers must have reached.
        meeting: The number of a meeting of all replicas; `None`: this is none.
        samples: Samples that went into it.
        steps: Steps that went into it.
        step: The step at which it began.
        pull_first: Whether to read first and send the difference between that and this vector, float32 `[size]`, with
            `values` for the result.
        delay: Seconds to wait before it starts; for experiments.
        done: Set when all owners have answered, or when that cannot happen any more.
        sequences: Per owner: how many of this replica's contributions its answer contains.
        contains: Per owner: what its answer contains.
        leads: Per owner: the clock of the slowest replica that counts.
        staleness: Per owner: how stale the contribution was.
        seconds: How long it took.
    """

    values: Tensor | None = None
    sequence: int = -1
    clock: int = 0
    need: int = 0
    meeting: int | None = None
    samples: float = 1.0
    steps: int = 0
    step: int = 0
    pull_first: Tensor | None = None
    delay: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    sequences: list[int] = field(default_factory=list)
    contains: list[dict[int, int]] = field(default_factory=list)
    leads: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Client:
    """Runs errands, one after the other.

    Args:
        run: What letters of this run have in common.
        box: This rank's box, open until the client is closed.
        endpoints: The boxes of all ranks.
        layout: How the vector is cut.
        codec: What slices are on the wire. Unless it is exact, what was not sent is kept and sent next time: 4 bytes
            per element.
        fetched: Where the owners' values go, float32 `[size]`; holds what all have at the beginning.
        topology: All ranks.
        counters: Where requests are counted.
        on_error: Called with what ends the thread.
    """

    def __init__(
        self,
        run: Run,
        box: Box,
        endpoints: Sequence[str],
        *,
        layout: FlatLayout,
        codec: Codec,
        fetched: Tensor,
        topology: Topology,
        counters: Counters,
        on_error: Callable[[BaseException, str], None],
    ) -> None:
        self.fetched = fetched
        self.residual = None if codec.exact else layout.zeros()
        self.error: BaseException | None = None
        self.versions = [0] * topology.size
        self._layout = layout
        self._codec = codec
        self._topology = topology
        self._counters = counters
        self._on_error = on_error
        self._run = run
        self._box = box
        self._endpoints = list(endpoints)
        self._request = time.time_ns()  # rises from one client to the next, too
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._closing = False
        self._sent = None if codec.exact else layout.zeros()
        self._thread = start_thread(self._work, "client")

    def start(self, errand: Errand) -> Errand:
        """Begin an errand as soon as those before have ended."""
        self._errands.put(errand)
        if self.error is not None:
            errand.done.set()
        return errand

    def check(self) -> None:
        """Raise what has ended the thread."""
        if self.error is not None:
            raise self.error

    def close(self, seconds: float = 5.0) -> None:
        """End the thread, and its connections; an errand under way is given up."""
        self._closing = True
        self._errands.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        lines = None
        errand: Errand | None = None
        try:
            lines = Lines(self._run, self._box, self._endpoints, self._topology.rank)
            while not self._closing:
                errand = self._errands.get()
                if errand is None:
                    return
                self._do(errand, lines)
                errand.done.set()
        except BaseException as error:  # has to reach the training thread
            self.error = error
            self._on_error(error, "an exchange with the owners of parameters")
        finally:
            self._closing = True
            if lines is not None:
                lines.close()
            if errand is not None:
                errand.done.set()

    def _do(self, errand: Errand, lines: Lines) -> None:
        begin = time.monotonic()
        if errand.delay:
            time.sleep(errand.delay)
        values, errand.values = errand.values, None
        if errand.pull_first is not None and values is not None:
            self._ask(errand, lines, need=0)
            torch.sub(self.fetched, errand.pull_first, out=values)
        errand.values = values
        self._ask(errand, lines, need=errand.need)
        errand.seconds = time.monotonic() - begin

    def _ask(self, errand: Errand, lines: Lines, need: int) -> None:
        self._request += 1
        slots = self._topology.size
        errand.sequences, errand.leads, errand.staleness = [0] * slots, [0] * slots, [0] * slots
        errand.contains = [{} for _ in range(slots)]
        letters = [self._letter(owner, errand, need) for owner in range(slots)]
        lines.ask(letters, lambda: self._closing, lambda owner, letter: self._took(owner, letter, errand))

    def _letter(self, owner: int, errand: Errand, need: int) -> Letter:
        a, b = self._layout.slices[owner]
        body: object = b""
        if errand.values is not None:
            self._check_finite(errand, a, b)
            body = self._encode(errand.values[a:b], a, b).numpy().data
            count_letter(self._counters, self._topology, owner, len(body), 4 * (b - a))
        kind = EXCHANGE if errand.meeting is None else MEET
        need = need if errand.meeting is None else errand.meeting
        sequence = errand.sequence if errand.values is not None else -1
        numbers = (sequence, errand.clock, self.versions[owner], max(0, need))
        return Letter(kind, self._topology.rank, self._request, numbers, (errand.samples, float(errand.steps)), body)

    def _check_finite(self, errand: Errand, a: int, b: int) -> None:
        assert errand.values is not None
        # Terms of float32 cannot overflow a sum of float64, so it is finite exactly if all of them are.
        if bool(errand.values[a:b].sum(dtype=torch.float64).isfinite()):
            return
        place = a + int((~errand.values[a:b].isfinite()).nonzero()[0])
        raise NonFiniteError(errand.step, self._layout.name_at(place), self._topology.rank)

    def _encode(self, values: Tensor, a: int, b: int) -> Tensor:
        if self.residual is None or self._sent is None:
            return self._codec.encode(values)
        kept, sent = self.residual[a:b], self._sent[a:b]
        kept.add_(values)
        code = self._codec.encode(kept)
        self._codec.decode(code, sent)
        kept.sub_(sent)
        return code

    def _took(self, owner: int, letter: Letter, errand: Errand) -> None:
        if letter.kind != ANSWER:
            raise RuntimeError(f"Rank {owner} has refused a contribution: {bytes(letter.body).decode()}")
        version, errand.sequences[owner], errand.leads[owner], errand.staleness[owner] = letter.numbers
        errand.contains[owner], code = parse_answer(letter, self._topology.size)
        self.versions[owner] = version
        a, b = self._layout.slices[owner]
        place = self.fetched[a:b]
        if self._codec.exact or errand.meeting is not None:  # where all must read the same bits
            EXACT.decode(as_bytes(code), place)
        elif self._sent is not None:
            sent = self._sent[a:b]
            self._codec.decode(as_bytes(code), sent)
            place.add_(sent)
