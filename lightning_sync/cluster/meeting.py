"""All ranks meet at rank 0 before any process group exists, and hear the same verdict.

Rank 0 listens on a free port and says where in a file beside the run directory, with a secret that whoever connects
must prove to know. That all ranks see the file shows that the folder is shared. Lines of JSON travel, nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LINE = 1 << 20  # bytes: the longest line that is read
_CHUNK = 1 << 20
_MEASURED_WITHIN = 60.0


class MeetingError(Exception):
    """This rank has not met the others.

    Args:
        message: What is wrong.
        unseen: Whether it did not even see rank 0's file.
    """

    def __init__(self, message: str, unseen: bool = False) -> None:
        super().__init__(message)
        self.unseen = unseen


@dataclass(frozen=True)
class Gathered:
    """What rank 0 knows when all have come, or the time is over.

    Attributes:
        words: What every rank has said, by rank; those that have not come are missing.
        skews: Seconds by which their clocks are ahead of rank 0's.
        rates: MB/s from a rank to rank 0, where that was measured.
    """

    words: dict[int, Any]
    skews: dict[int, float]
    rates: dict[int, float]


def host_meeting(
    place: Path,
    words: Any,
    world_size: int,
    judge: Callable[[Gathered], Any],
    *,
    addresses: Sequence[str],
    deadline: float,
    measure: Sequence[int] = (),
    measure_mb: int = 16,
) -> Any:
    """Rank 0's part.

    Args:
        place: The file; removed at the end.
        words: What rank 0 has to say.
        world_size: How many ranks there are.
        judge: Makes the verdict out of what was gathered.
        addresses: Where this host can be reached.
        deadline: Seconds within which all have to come.
        measure: Ranks that send ``measure_mb`` MB, one after the other.
        measure_mb: As above.

    Returns:
        The verdict, which all ranks that have come return as well.

    Raises:
        OSError: The file cannot be written.
    """
    secret = secrets.token_hex(16)
    until = time.monotonic() + deadline
    gathered = Gathered({0: words}, {}, {})
    lines: dict[int, _Line] = {}
    with socket.create_server(("", 0), backlog=world_size) as server:
        server.settimeout(0.2)
        _publish(place, {"addresses": list(addresses), "port": server.getsockname()[1], "secret": secret})
        try:
            while len(lines) < world_size - 1 and time.monotonic() < until:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                line = _Line(connection, min(10.0, deadline))
                greeting = line.receive()
                rank = greeting.get("rank") if isinstance(greeting, dict) else None
                if (
                    not isinstance(rank, int)
                    or not 0 < rank < world_size
                    or rank in lines
                    or not hmac.compare_digest(str(greeting.get("proof")), _proof(secret, rank))
                ):
                    line.close()  # not one of ours
                    continue
                lines[rank] = line
                gathered.words[rank] = greeting["words"]
                gathered.skews[rank] = line.skew()
            for rank in measure:
                if rank in lines:
                    gathered.rates[rank] = lines[rank].measure(measure_mb)
            verdict = judge(gathered)
            for line in lines.values():
                line.send({"verdict": verdict})
        finally:
            place.unlink(missing_ok=True)
            for line in lines.values():
                line.close()
    return verdict


def attend_meeting(place: Path, rank: int, words: Any, *, deadline: float) -> Any:
    """Every other rank's part.

    Args:
        place: The file that rank 0 writes.
        rank: This rank.
        words: What it has to say.
        deadline: Seconds until it gives up.

    Returns:
        The verdict.

    Raises:
        MeetingError: The file did not appear, rank 0 cannot be reached, or the connection was lost.
    """
    until = time.monotonic() + deadline
    invitation = None
    while invitation is None:
        invitation = _read(place)
        if invitation is None:
            if time.monotonic() > until:
                raise MeetingError(f"{place}, which rank 0 writes, did not appear within {deadline:g} s", unseen=True)
            time.sleep(0.05)
    line = _connect(invitation["addresses"], invitation["port"], until)
    try:
        line.send({"rank": rank, "proof": _proof(invitation["secret"], rank), "words": words})
        while True:
            asked = line.receive()
            if not isinstance(asked, dict):
                raise MeetingError("rank 0 has ended the conversation; its own output says why")
            if "verdict" in asked:
                return asked["verdict"]
            if "send_mb" in asked:
                line.flood(int(asked["send_mb"]))
            else:
                line.send({"time": time.time()})
    except OSError as error:
        raise MeetingError(f"the connection to rank 0 was lost ({error})") from error
    finally:
        line.close()


class _Line:
    """A connection on which lines of JSON travel."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self._socket = connection
        self._socket.settimeout(timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pending = b""

    def send(self, message: Any) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            return  # whoever has gone finds out by itself

    def receive(self) -> Any:
        """The next line; None when the other side has gone, is silent, or talks nonsense."""
        while b"\n" not in self._pending:
            try:
                more = self._socket.recv(_CHUNK)
            except (TimeoutError, ConnectionError):
                return None
            if not more or len(self._pending) > _LINE:
                return None
            self._pending += more
        text, _, self._pending = self._pending.partition(b"\n")
        try:
            return json.loads(text)
        except ValueError:
            return None

    def skew(self) -> float:
        """How far the other clock is ahead; the answer was given half-way."""
        before = time.time()
        self.send({"time": None})
        answer = self.receive()
        after = time.time()
        there = answer.get("time") if isinstance(answer, dict) else None
        return float(there) - (before + after) / 2 if isinstance(there, float) else 0.0

    def measure(self, megabytes: int) -> float:
        """MB/s at which the other side's bytes arrive."""
        left = megabytes * 1_000_000
        self.send({"send_mb": megabytes})
        begun = time.monotonic()
        self._socket.settimeout(_MEASURED_WITHIN)
        try:
            while left > 0:
                received = len(self._socket.recv(min(left, _CHUNK)))
                if not received:
                    break
                left -= received
        except (TimeoutError, ConnectionError):
            pass
        return (megabytes - left / 1e6) / max(time.monotonic() - begun, 1e-9)

    def flood(self, megabytes: int) -> None:
        block = bytes(1_000_000)
        self._socket.settimeout(_MEASURED_WITHIN)
        for _ in range(megabytes):
            self._socket.sendall(block)

    def close(self) -> None:
        self._socket.close()


def _connect(addresses: Sequence[str], port: int, until: float) -> _Line:
    problem: OSError = OSError("it has no address")
    while True:
        for address in addresses:
            left = until - time.monotonic()
            try:
                connection = socket.create_connection((address, port), timeout=max(1.0, min(5.0, left)))
            except OSError as error:
                problem = error
                continue
            # Rank 0 answers when the last rank has come.
            return _Line(connection, max(10.0, left + _MEASURED_WITHIN))
        if time.monotonic() > until:
            raise MeetingError(f"rank 0 cannot be reached at {', '.join(addresses)} port {port} ({problem})")
        time.sleep(0.2)


def _proof(secret: str, rank: int) -> str:
    return hmac.new(secret.encode(), str(rank).encode(), hashlib.sha256).hexdigest()


def _publish(place: Path, invitation: Any) -> None:
    place.unlink(missing_ok=True)
    partial = place.with_name(f"{place.name}.part")
    partial.unlink(missing_ok=True)
    # Only the user may read the secret.
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(invitation, file)
    partial.replace(place)


def _read(place: Path) -> Any:
    try:
        os.listdir(place.parent)  # network file systems forget by this that the file was missing
        return json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
