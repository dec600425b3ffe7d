"""An owner: a thread that applies what arrives to its shard, and answers with what the shard holds then."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sync.asynchronous.codec import EXACT, Codec, as_bytes
from lightning_sync.asynchronous.ledger import SequenceGapError
from lightning_sync.asynchronous.rules.base import Contribution
from lightning_sync.asynchronous.shard import Shard
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.mail import Box, Letter, start_thread
from lightning_sync.comm.topology import Bytes, Topology

#: Kinds of letters. EXCHANGE: numbers are (sequence number, or -1 without a contribution; clock; version computed on;
#: clock that everybody's updates in the answer must have reached), reals (samples, steps). MEET: the same, with the
#: number of the meeting in the last place. ANSWER: (version, sequence numbers of the reader in it, least clock of those
#: that others wait for, staleness), and per replica the clock its updates reach, then the values.
EXCHANGE, MEET, ANSWER, REFUSAL = 1, 2, 16, 17


@dataclass
class _Waiting:
    """A request that is not answered yet."""

    back: bytes
    letter: Letter
    staleness: int


class Owner:
    """Serves one shard.

    A request may bring a contribution, which is applied at once, and is answered when its condition holds: that every
    replica's updates have reached a clock (so that no reader ever computes on less than its bound allows), or that all
    replicas have come to a meeting, of which all then read the same bits.

    Args:
        box: Where letters arrive; the owner's thread uses and closes it.
        shard: What it owns.
        codec: What contributions and values are on the wire. Unless exact, values are sent as differences to what the
            reader has, so that what one answer leaves out is in the next: 4 bytes per element and reader.
        weight: What contributions are multiplied by.
        ordered: Whether to apply contributions only when every rank that is not at a meeting has sent one, in the order
            of ranks: bit for bit the same in every run, where ranks wait for each other anyway.
        topology: All ranks.
        counters: Where answers are counted.
        on_error: Called with what ends the thread.

    Attributes:
        lock: Held while the shard changes or is read.
    """

    def __init__(
        self,
        box: Box,
        shard: Shard,
        codec: Codec,
        *,
        weight: float,
        ordered: bool = False,
        topology: Topology,
        counters: Counters,
        on_error: Callable[[BaseException, str], None],
    ) -> None:
        self.shard = shard
        self.lock = threading.Lock()
        self._box = box
        self._codec = codec
        self._weight = weight
        self._ordered = ordered
        self._topology = topology
        self._counters = counters
        self._on_error = on_error
        ranks = range(topology.size)
        self._given: dict[int, Tensor] = {} if codec.exact else {r: shard.values.clone() for r in ranks}
        self._received = torch.empty_like(shard.values)
        self._waiting: dict[int, _Waiting] = {}
        self._held: dict[int, tuple[bytes, Letter]] = {}
        self._answered: dict[int, tuple[int, Letter]] = {}
        self._met = dict.fromkeys(ranks, 0)
        self._closing = False
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def rejected(self) -> dict[str, int]:
        """How many letters and connections were refused, by reason."""
        return dict(self._box.rejected)

    def start(self) -> None:
        """Serve from now on, from the values that the shard has now."""
        for given in self._given.values():
            given.copy_(self.shard.values)
        if self.shard.rule.needs_backup:
            for reader in self._met:
                self.shard.read(reader)
        self._thread = start_thread(self._serve, "owner")

    def close(self, seconds: float = 5.0) -> None:
        """End the thread, then close the box (the client's connections must be closed before)."""
        self._closing = True
        if self._thread is not None:
            self._box.wake()
            self._thread.join(seconds)
            if self._thread.is_alive():  # its sockets are in use; they end with the process
                return
            self._thread = None
        self._box.close()

    def check(self) -> None:
        """Raise what has ended the thread."""
        if self.error is not None:
            raise self.error

    def _serve(self) -> None:
        try:
            while not self._closing:
                for back, letter in self._box.receive(self._patience()):
                    self._take(back, letter)
                self._tick()
                self._answer_those_who_wait()
        except BaseException as error:  # has to reach the training thread, and the other ranks
            self.error = error
            self._on_error(error, f"the shard of rank {self._topology.rank}")

    def _patience(self) -> float:
        with self.lock:
            due = self.shard.due()
        return 0.1 if due is None else min(0.1, max(0.0, due - time.monotonic()))

    def _tick(self) -> None:
        with self.lock:
            due = self.shard.due()
            if due is not None and due <= time.monotonic():
                self.shard.tick(time.monotonic())

    def _take(self, back: bytes, letter: Letter) -> None:
        """Apply what the letter brings, once, and note that its sender waits."""
        request, answer = self._answered.get(letter.sender, (-1, letter))
        waiting = self._waiting.get(letter.sender)
        held = self._held.get(letter.sender)
        if held is not None and held[1].request == letter.request:
            self._held[letter.sender] = back, letter
            return
        if letter.request == request:
            self._box.answer(back, answer)
            return
        if waiting is not None and waiting.letter.request == letter.request:
            waiting.back = back
            return
        if waiting is not None or held is not None or letter.request < request:
            self._box.rejected["replayed"] += 1
            return
        reason = self._fault(letter)
        if reason is not None:
            self._box.rejected[reason] += 1
            return
        if not self._ordered or letter.numbers[0] < 0:
            self._accept(back, letter)
        else:
            self._held[letter.sender] = back, letter
        meeting = {r for r, w in self._waiting.items() if w.letter.kind == MEET}
        if self._held and self._held.keys() | meeting == self._met.keys():
            for sender in sorted(self._held):
                self._accept(*self._held.pop(sender))

    def _accept(self, back: bytes, letter: Letter) -> None:
        try:
            staleness = self._apply(letter)
        except (ValueError, SequenceGapError) as error:  # nothing was changed
            self._box.rejected["impossible"] += 1
            self._box.answer(
                back, Letter(REFUSAL, self._topology.rank, letter.request, body=str(error).encode()[:1000])
            )
            return
        if letter.kind == MEET:
            self._met[letter.sender] = letter.numbers[3]
        self._waiting[letter.sender] = _Waiting(back, letter, staleness)

    def _fault(self, letter: Letter) -> str | None:
        sequence, clock, version, need = letter.numbers
        samples, steps = letter.reals
        length = self._codec.nbytes(self.shard.values.numel()) if sequence >= 0 else 0
        sound = (
            letter.kind in (EXCHANGE, MEET)
            and sequence >= -1
            and min(clock, version, need) >= 0
            and math.isfinite(samples)
            and samples >= 0
            and 0 <= steps < 2**53
            and len(letter.body) == length
        )
        return None if sound else "malformed"

    def _apply(self, letter: Letter) -> int:
        sequence, clock, version, _ = letter.numbers
        if sequence < 0:
            return 0
        values = self._received
        self._codec.decode(as_bytes(letter.body), values)
        contribution = Contribution(
            letter.sender, sequence, values, version, clock, self._weight, letter.reals[0], int(letter.reals[1])
        )
        with self.lock:
            return self.shard.apply(contribution, time.monotonic()).staleness

    def _answer_those_who_wait(self) -> None:
        if not self._waiting:
            return
        reached = {r: self.shard.contains.get(r, 0) for r in self._met}
        # Who is at a meeting has sent all it had, and waits itself.
        meeting = {r for r, w in self._waiting.items() if w.letter.kind == MEET}
        least = min((c for r, c in reached.items() if r not in meeting), default=max(reached.values()))
        together = min(self._met.values())
        if any(w.letter.kind == MEET and together >= w.letter.numbers[3] for w in self._waiting.values()):
            with self.lock:
                self.shard.flush()
        for sender, waiting in list(self._waiting.items()):
            need = waiting.letter.numbers[3]
            if (together if waiting.letter.kind == MEET else least) >= need:
                del self._waiting[sender]
                self._answer(waiting, least)

    def _answer(self, waiting: _Waiting, least: int) -> None:
        reader = waiting.letter.sender
        with self.lock:
            read = self.shard.read(reader)
        assert read.values is not None
        contains = np.array([read.contains.get(r, 0) for r in self._met], dtype=np.int64)
        sent = self._encode(reader, read.values, exact=waiting.letter.kind == MEET)
        body = contains.tobytes() + sent.numpy().tobytes()
        numbers = (read.version, read.sequences.get(reader, 0), least, waiting.staleness)
        letter = Letter(ANSWER, self._topology.rank, waiting.letter.request, numbers, body=body)
        self._answered[reader] = waiting.letter.request, letter
        count_letter(self._counters, self._topology, reader, len(body), read.values.nbytes)
        self._box.answer(waiting.back, letter)

    def _encode(self, reader: int, values: Tensor, *, exact: bool) -> Tensor:
        if self._codec.exact:
            return self._codec.encode(values)
        given = self._given[reader]
        if exact:
            given.copy_(values)
            return EXACT.encode(values)
        code = self._codec.encode(values - given)
        sent = torch.empty_like(values)
        self._codec.decode(code, sent)
        given.add_(sent)
        return code


def count_letter(counters: Counters, topology: Topology, peer: int, nbytes: int, dense: int) -> None:
    """Count one letter of `nbytes`, where float32 would have taken `dense`; none for what stays in this process."""
    if peer == topology.rank:
        return
    remote = topology.is_remote(peer)
    counters.count(nbytes, Bytes(nbytes, nbytes if remote else 0), int(remote))
    counters.count_dense(Bytes(dense, dense if remote else 0))


def parse_answer(letter: Letter, ranks: int) -> tuple[dict[int, int], Any]:
    """What an answer's values contain, per replica, and the values as they are on the wire."""
    contains = np.frombuffer(letter.body[: 8 * ranks], dtype=np.int64)
    return {r: int(c) for r, c in enumerate(contains) if c}, letter.body[8 * ranks :]
