"""Letters between any two ranks, at any time: what collectives cannot do.

Every rank has one box into which all others put requests and out of which they get answers (ZeroMQ over TCP). Both
sides prove that they know the run's key pair, and everything is encrypted (CURVE: Curve25519, XSalsa20, Poly1305). A
letter is a header of fixed size and plain bytes; nothing in it is ever executed or unpickled.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from lightning_sync.state import ParamSpec

_MAGIC, _FORMAT = b"LSYN", 1
# magic, format, kind, sender, run, model, request; then what the kind of letter means by them: 4 integers, 2 reals;
# length of the body.
_HEADER = struct.Struct("<4sBBHQQQqqqqddQ")
_SLACK = 4096
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class LetterError(ValueError):
    """What has arrived is no letter of this run; the text is the reason, one of a few."""


@dataclass(frozen=True)
class Letter:
    """One message.

    Attributes:
        kind: What it is, 0 to 255; up to its users.
        sender: The rank that wrote it.
        request: A number that the answer repeats.
        numbers: Four integers of 64 bits.
        reals: Two real numbers.
        body: Bytes, perhaps none.
    """

    kind: int
    sender: int
    request: int
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    reals: tuple[float, float] = (0.0, 0.0)
    body: Any = b""


@dataclass(frozen=True)
class Run:
    """What letters of one run have in common, and nobody else's.

    Attributes:
        secret: The run's secret key, 40 characters; drawn by one rank, told to the others and to nobody else.
        number: The run, 64 bits.
        model: The model, 64 bits; see `fingerprint`.
        ranks: How many ranks there are.
        largest: Bytes that a body may have.
    """

    secret: bytes
    number: int
    model: int
    ranks: int
    largest: int

    def __repr__(self) -> str:
        # The secret must not get into logs.
        return f"Run(number={self.number:#x}, model={self.model:#x}, ranks={self.ranks}, largest={self.largest})"

    def pack(self, letter: Letter) -> bytes:
        """The header."""
        return _HEADER.pack(
            _MAGIC, _FORMAT, letter.kind, letter.sender, self.number, self.model, letter.request,
            *letter.numbers, *letter.reals, len(memoryview(letter.body).cast("B")),
        )  # fmt: skip

    def unpack(self, frames: Sequence[Any]) -> Letter:
        """The letter in these frames.

        Raises:
            LetterError: if it is not one of this run and this model, or cut, or too long.
        """
        if len(frames) != 2 or len(frames[0]) != _HEADER.size:
            raise LetterError("malformed")
        magic, version, kind, sender, number, model, request, a, b, c, d, x, y, length = _HEADER.unpack(frames[0])
        if magic != _MAGIC or version != _FORMAT:
            raise LetterError("malformed")
        if number != self.number:
            raise LetterError("another run")
        if model != self.model:
            raise LetterError("another model")
        if sender >= self.ranks or length != len(frames[1]) or length > self.largest:
            raise LetterError("malformed")
        return Letter(kind, sender, request, (a, b, c, d), (x, y), frames[1])


def new_secret() -> bytes:
    """A secret key for a run."""
    return bytes(zmq.curve_keypair()[1])


def fingerprint(params: Sequence[ParamSpec]) -> int:
    """64 bits of a hash over names, shapes and dtypes, in order."""
    text = "\n".join(f"{p.name} {tuple(p.shape)} {p.dtype}" for p in params)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def own_address(towards: str) -> str:
    """The address of the interface through which `towards` (a host name or address) is reached."""
    family, _, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        address = str(probe.getsockname()[0])
    return f"[{address}]" if ":" in address else address


class Box:
    """Takes letters from any rank, in any order, and sends answers; belongs to one thread once it is made.

    Args:
        run: What to accept.
        address: Where to listen, without a port: the system picks one.

    Attributes:
        rejected: How many letters and connections were refused, by reason.
        endpoint: Where other ranks connect to.
        near: The same for threads of this process.
    """

    def __init__(self, run: Run, address: str) -> None:
        self.run = run
        self.context = zmq.Context()
        self.rejected: Counter[str] = Counter()
        self._public = zmq.curve_public(run.secret)
        self._guard = self.context.socket(zmq.REP)
        self._guard.linger = 0
        self._guard.bind("inproc://zeromq.zap.01")  # where the library asks who may come in
        self._socket = _prepare(self.context.socket(zmq.ROUTER), run)
        self._socket.curve_server = True
        self._socket.curve_secretkey = run.secret
        self._socket.zap_domain = b"lightning_sync"
        # A peer that is gone, or does not read its answers, must not stop the thread.
        self._socket.sndtimeo = 0
        self._refusals = self._socket.get_monitor_socket(_REFUSED)
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        self.endpoint = f"tcp://{address}:{port}"
        self.near = f"inproc://box-{port}"
        self._socket.bind(self.near)
        self._bell = self.context.socket(zmq.PULL)
        self._bell.bind("inproc://bell")
        self._poller = zmq.Poller()
        for each in (self._guard, self._socket, self._refusals, self._bell):
            self._poller.register(each, zmq.POLLIN)

    def receive(self, seconds: float) -> list[tuple[bytes, Letter]]:
        """The letters that have arrived, each with the way back to its sender; waits at most `seconds` for one."""
        ready = dict(self._poller.poll(max(0, round(seconds * 1000))))
        if self._guard in ready:
            self._admit()
        if self._refusals in ready:
            parse_monitor_message(self._refusals.recv_multipart())
            self.rejected["without the key"] += 1
        if self._bell in ready:
            self._bell.recv()
        if self._socket not in ready:
            return []
        back, *frames = self._socket.recv_multipart(copy=False)
        try:
            return [(back.bytes, self.run.unpack([f.buffer for f in frames]))]
        except LetterError as error:
            self.rejected[str(error)] += 1
            return []

    def answer(self, back: bytes, letter: Letter) -> bool:
        """Send an answer; False if its reader is gone or does not read. The body must not change any more."""
        try:
            self._socket.send_multipart([back, self.run.pack(letter), letter.body], copy=False)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        """End a `receive` that waits (any thread)."""
        with self.context.socket(zmq.PUSH) as rope:
            rope.connect("inproc://bell")
            rope.send(b"")

    def _admit(self) -> None:
        frames = self._guard.recv_multipart()
        known = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] == z85.decode(self._public)
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self._guard.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", *status, b"", b""])

    def close(self) -> None:
        """Give all sockets and the library's threads back; what was not sent yet is dropped."""
        self._socket.disable_monitor()
        for each in (self._refusals, self._socket, self._guard, self._bell):
            each.close(linger=0)
        self.context.term()


class Lines:
    """Connections from one rank to the boxes of all; belongs to one thread once it is made.

    Args:
        run: As of the boxes.
        box: This rank's own, whose library threads are shared; it must be closed after this.
        endpoints: Where the boxes are, by rank.
        rank: This rank.
    """

    def __init__(self, run: Run, box: Box, endpoints: Sequence[str], rank: int) -> None:
        self.run = run
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        public = zmq.curve_public(run.secret)
        for owner, endpoint in enumerate(endpoints):
            line = _prepare(box.context.socket(zmq.DEALER), run)
            if owner != rank:
                line.curve_serverkey = line.curve_publickey = public
                line.curve_secretkey = run.secret
            monitor = line.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            line.connect(box.near if owner == rank else endpoint)
            self._sockets.append(line)
            self._monitors.append(monitor)
            self._poller.register(line, zmq.POLLIN)
        self._connected = [0] * len(endpoints)

    def ask(self, letters: Sequence[Letter], given_up: Callable[[], bool], took: Callable[[int, Letter], None]) -> bool:
        """Put one letter into every box and take the answers as they come.

        A letter is sent again when its connection was lost and has come back, so boxes must recognise repetitions.

        Args:
            letters: By rank. Their bodies must not change before the answers are there.
            given_up: Asked ten times a second.
            took: Called with the rank and its answer.

        Returns:
            Whether all have answered; False as soon as `given_up()`.
        """
        waiting = dict(enumerate(letters))
        for owner, letter in waiting.items():
            self._send(owner, letter)
        while waiting:
            if given_up():
                return False
            ready = dict(self._poller.poll(100))
            for owner in list(waiting):
                if self._sockets[owner] in ready:
                    frames = self._sockets[owner].recv_multipart(copy=False)
                    answer = self.run.unpack([f.buffer for f in frames])
                    if answer.request == letters[owner].request:  # else the second answer to a letter sent twice
                        del waiting[owner]
                        took(owner, answer)
                elif self._came_back(owner):
                    self._send(owner, letters[owner])
        return True

    def _send(self, owner: int, letter: Letter) -> None:
        self._sockets[owner].send_multipart([self.run.pack(letter), letter.body], copy=False)

    def _came_back(self, owner: int) -> bool:
        before = self._connected[owner]
        while self._monitors[owner].poll(0):
            parse_monitor_message(self._monitors[owner].recv_multipart())
            self._connected[owner] += 1
        return self._connected[owner] > max(before, 1)

    def close(self) -> None:
        """Close the connections; what was not sent yet is dropped."""
        for line, monitor in zip(self._sockets, self._monitors, strict=True):
            line.disable_monitor()
            monitor.close(linger=0)
            line.close(linger=0)


def _prepare(line: zmq.Socket[bytes], run: Run) -> zmq.Socket[bytes]:
    line.linger = 0
    line.ipv6 = True
    line.maxmsgsize = run.largest + _SLACK  # the library cuts the connection of who sends more
    line.sndhwm = line.rcvhwm = 8
    line.heartbeat_ivl, line.heartbeat_timeout = 2000, 10_000
    return line


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A started daemon thread of this package."""
    thread = threading.Thread(target=target, name=f"lightning_sync-{name}", daemon=True)
    thread.start()
    return thread
