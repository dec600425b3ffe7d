#!/usr/bin/env python3
"""Emulated hosts on one Linux machine: network namespaces joined by a switch, each link with a rate of its own.

    sudo python recipes/bench/hosts.py up 4 --rate 100mbit     # prints the prefix that names this set of hosts
    sudo python recipes/bench/hosts.py rate PREFIX 1gbit
    sudo python recipes/bench/hosts.py show PREFIX
    sudo python recipes/bench/hosts.py exec PREFIX 0 ping -c 1 10.77.0.11
    sudo python recipes/bench/hosts.py down PREFIX

From Python the hosts live as long as the block:

    with Hosts(4, rate="100mbit") as hosts:
        process = hosts.popen(0, ["python", "train.py"])

Needs root and iproute2 (`ip`, `tc`). Nothing is added to the machine's own network namespace, so several sets of hosts
can be up at once and may use the same addresses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
FIRST_ADDRESS = 10
MAX_HOSTS = 200
DEFAULT_BURST = "128kb"  # what may pass at once: two of the largest segments that TCP hands to the interface
DEFAULT_QUEUE = "1mb"  # a switch-like buffer: 80 ms at 100 Mbit/s, 8 ms at 1 Gbit/s
DEFAULT_CONGESTION = "cubic"
UNLIMITED = "unlimited"

_PREFIX = re.compile(r"lsync-[0-9a-z]{1,16}")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class HostsError(RuntimeError):
    """The hosts could not be made, changed or found; the message says what to do."""


@dataclass(frozen=True)
class InterfaceCounters:
    """What an interface has carried since it came up, link-layer headers included.

    A segment that TCP hands to the interface in one piece (up to 64 kB, segmentation offload) counts as one packet
    with one header, as on the machines whose network card cuts it.

    Attributes:
        tx_bytes: Bytes sent.
        rx_bytes: Bytes received.
        tx_packets: Packets sent.
        rx_packets: Packets received.
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int

    @classmethod
    def read(cls, interface: str = "eth0") -> InterfaceCounters:
        """Read the counters of an interface of the namespace this process runs in.

        Args:
            interface: Name of the interface.

        Raises:
            HostsError: There is no such interface here.
        """
        folder = Path("/sys/class/net") / interface / "statistics"
        if not folder.is_dir():
            raise HostsError(f"interface={interface!r} does not exist in this network namespace.")
        return cls(**{field.name: int((folder / field.name).read_text()) for field in fields(cls)})

    def __sub__(self, other: InterfaceCounters) -> InterfaceCounters:
        return InterfaceCounters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def bits_per_second(rate: str) -> float | None:
    """Read a rate such as `100mbit`, `2.5gbit` or `unlimited`.

    Args:
        rate: A number directly followed by `kbit`, `mbit` or `gbit` (powers of 1000), or `unlimited`.

    Returns:
        Bits per second, None for `unlimited`.

    Raises:
        ValueError: The text is neither.
    """
    if rate == UNLIMITED:
        return None
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"rate={rate!r} is not a link rate. Accepted: {UNLIMITED!r}, or a positive number directly followed by "
            "kbit, mbit or gbit, e.g. '100mbit'."
        )
    return float(match[1]) * _UNITS[match[2]]


def why_unavailable() -> str | None:
    """Say why hosts cannot be emulated here, or None when they can (found out by making one limited interface)."""
    try:
        _check_tools()
        with Hosts(1, rate="100mbit"):
            return None
    except HostsError as error:
        return str(error)


class Hosts:
    """A set of emulated hosts, up from `up()` (or entering the block) until `down()` (or leaving it).

    Every host is a namespace with one interface, `eth0`, at 10.77.0.10 + its index, connected to a bridge that has a
    namespace of its own. The rate holds for what the host sends (token bucket on `eth0`) and for what it receives
    (token bucket on the switch port towards it), each on its own: full duplex, as on a switch. No delay is added.

    Args:
        count: Number of hosts, 1 to 200.
        rate: Rate of each link, e.g. `100mbit`, or `unlimited`.
        prefix: Name of this set, `lsync-` and up to 16 of a-z0-9; a random one when None.
        burst: Bytes that may pass at once above the rate, in tc's notation.
        queue: Bytes that wait in front of the link before packets are dropped, in tc's notation.
        congestion: TCP congestion control of the hosts' connections; the kernel must have it.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        count: int,
        rate: str = UNLIMITED,
        *,
        prefix: str | None = None,
        burst: str = DEFAULT_BURST,
        queue: str = DEFAULT_QUEUE,
        congestion: str = DEFAULT_CONGESTION,
    ) -> None:
        if not 1 <= count <= MAX_HOSTS:
            raise ValueError(f"count={count!r} hosts cannot be emulated. Accepted: 1 to {MAX_HOSTS}.")
        bits_per_second(rate)
        self.count = count
        self.rate = rate
        self.prefix = f"lsync-{secrets.token_hex(3)}" if prefix is None else _checked_prefix(prefix)
        self.burst = burst
        self.queue = queue
        self.congestion = congestion
        self._processes: list[subprocess.Popen[Any]] = []

    @classmethod
    def attach(cls, prefix: str) -> Hosts:
        """Find hosts that another process brought up.

        Args:
            prefix: The name of the set, as printed by `up`.

        Raises:
            HostsError: No such set is up.
        """
        _checked_prefix(prefix)
        _check_tools()
        count = sum(re.fullmatch(re.escape(prefix) + r"-h\d+", name) is not None for name in _namespaces())
        if count == 0:
            known = sorted({name.rpartition("-")[0] for name in _namespaces() if _PREFIX.match(name)})
            raise HostsError(f"prefix={prefix!r} names no hosts that are up. Up are: {', '.join(known) or 'none'}.")
        return cls(count, prefix=prefix)

    def __enter__(self) -> Hosts:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def namespace(self, host: int) -> str:
        """Name of a host's network namespace.

        Raises:
            ValueError: There is no host of that index.
        """
        if not 0 <= host < self.count:
            raise ValueError(f"host={host!r} does not exist. Accepted: 0 to {self.count - 1}.")
        return f"{self.prefix}-h{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host's `eth0`.

        Raises:
            ValueError: There is no host of that index.
        """
        self.namespace(host)
        return f"{NETWORK}.{FIRST_ADDRESS + host}"

    def up(self) -> None:
        """Make the hosts. If that fails half-way, what was made is removed again.

        Raises:
            HostsError: A tool, a right or a kernel feature is missing, or the prefix is in use.
        """
        _check_tools()
        taken = self._own_namespaces()
        if taken:
            raise HostsError(f"prefix={self.prefix!r} is in use ({', '.join(taken)}). Take another or bring it down.")
        try:
            self._build()
        except BaseException:
            self.down()
            raise

    def set_rate(self, rate: str) -> None:
        """Change the rate of all links; queues are emptied.

        Args:
            rate: E.g. `1gbit`, or `unlimited`.

        Raises:
            ValueError: The text is not a rate.
        """
        bits_per_second(rate)
        self.rate = rate
        for host in range(self.count):
            self._limit(self.namespace(host), "eth0")
            self._limit(self._switch, f"port{host}")

    def counters(self, host: int) -> InterfaceCounters:
        """Read a host's interface counters from outside the host."""
        names = [field.name for field in fields(InterfaceCounters)]
        files = [f"/sys/class/net/eth0/statistics/{name}" for name in names]
        lines = _run(["ip", "netns", "exec", self.namespace(host), "cat", *files]).split()
        return InterfaceCounters(**dict(zip(names, map(int, lines), strict=True)))

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside a host; the process id stays that of the started process."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process inside a host, as the leader of a session; `down()` ends it and its children.

        Args:
            host: Index of the host.
            command: Program and arguments.
            **options: As for `subprocess.Popen`.
        """
        process = subprocess.Popen(self.command(host, command), start_new_session=True, **options)
        self._processes.append(process)
        return process

    def describe(self) -> str:
        """One paragraph a host: address, counters, and the two token buckets with what they dropped."""
        parts = []
        for host in range(self.count):
            counters = self.counters(host)
            parts.append(f"host {host}  {self.address(host)}  namespace {self.namespace(host)}\n  {counters}")
            for label, namespace, device in (
                ("sends", self.namespace(host), "eth0"),
                ("receives", self._switch, f"port{host}"),
            ):
                shown = " ".join(_run(["tc", "-n", namespace, "-s", "qdisc", "show", "dev", device]).split())
                parts.append(f"  {label}: {shown if shown.startswith('qdisc tbf') else UNLIMITED}")
        return "\n".join(parts)

    def down(self) -> None:
        """End the processes started by `popen` and remove this set's namespaces; nothing else is touched."""
        for process in self._processes:
            end_session(process)
        self._processes.clear()
        for name in self._own_namespaces():
            _run(["ip", "netns", "del", name])

    @property
    def _switch(self) -> str:
        return f"{self.prefix}-switch"

    def _own_namespaces(self) -> list[str]:
        return [name for name in _namespaces() if re.fullmatch(re.escape(self.prefix) + r"-(h\d+|switch)", name)]

    def _build(self) -> None:
        _run(["ip", "netns", "add", self._switch])
        _batch(
            self._switch,
            "link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            "link set bridge addrgenmode none",
            "link set bridge up",
        )
        for host in range(self.count):
            namespace = self.namespace(host)
            _run(["ip", "netns", "add", namespace])
            _batch(
                self._switch,
                f"link add port{host} type veth peer name eth0 address {_hardware_address(host)} netns {namespace}",
                f"link set port{host} addrgenmode none",
                f"link set port{host} master bridge up",
            )
            # Neighbours are fixed and IPv6 is silent, so that an idle host's counters stand still.
            neighbours = [
                f"neigh add {self.address(peer)} lladdr {_hardware_address(peer)} dev eth0 nud permanent"
                for peer in range(self.count)
                if peer != host
            ]
            # Congestion control is a route attribute: the sysctl is refused inside a namespace.
            _batch(
                namespace,
                "link set lo up",
                "link set eth0 addrgenmode none",
                f"address add {self.address(host)}/24 dev eth0 noprefixroute",
                "link set eth0 up",
                f"route add {NETWORK}.0/24 dev eth0 src {self.address(host)} congctl {self.congestion}",
                *neighbours,
            )
        self.set_rate(self.rate)

    def _limit(self, namespace: str, device: str) -> None:
        if "tbf" in _run(["tc", "-n", namespace, "qdisc", "show", "dev", device, "root"]):
            _run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])
        if self.rate != UNLIMITED:
            bucket = ["tbf", "rate", self.rate, "burst", self.burst, "limit", self.queue]
            _run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket])


def exit_status(process: subprocess.Popen[Any]) -> int | None:
    """Exit status of a process without collecting it, negative for a signal; None while it runs.

    Uncollected, the process keeps its id from being given to another, so that its group can still be ended safely.
    """
    if process.returncode is not None:
        return process.returncode
    state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process and all processes of its group, and collect its exit status.

    A process whose status was collected before (`poll`, `wait`) is left alone: its id may belong to another by now.

    Args:
        process: A process that was started with `start_new_session=True`.
    """
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143), so that blocks that clean up behind themselves do."""

    def end(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _hardware_address(host: int) -> str:
    return f"02:00:0a:4d:00:{FIRST_ADDRESS + host:02x}"  # 02: locally administered, belongs to no maker


def _checked_prefix(prefix: str) -> str:
    if _PREFIX.fullmatch(prefix) is None:
        raise ValueError(f"prefix={prefix!r} is not accepted: 'lsync-' and 1 to 16 of a-z and 0-9, e.g. 'lsync-a1'.")
    return prefix


def _check_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise HostsError(
            f"{' and '.join(missing)} not found. Install iproute2 (Debian, Ubuntu: apt-get install iproute2)."
        )
    if os.geteuid() != 0:
        raise HostsError("network namespaces need root. Run the command as root, e.g. with sudo.")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _batch(namespace: str, *commands: str) -> None:
    _run(["ip", "-n", namespace, "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        given = f" given\n{text}" if text else ""
        raise HostsError(f"`{' '.join(command)}`{given} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description="Emulated hosts: namespaces joined by a switch, with limited links.")
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="make hosts that stay until `down`; prints their prefix")
    up.add_argument("count", type=int)
    up.add_argument("--rate", default=UNLIMITED, help="e.g. 100mbit, 1gbit, unlimited (default)")
    up.add_argument("--prefix", help="name of this set (default: a random one)")
    up.add_argument("--burst", default=DEFAULT_BURST, help="bytes that may pass at once (default: %(default)s)")
    up.add_argument("--queue", default=DEFAULT_QUEUE, help="buffer in front of a link (default: %(default)s)")
    up.add_argument("--congestion", default=DEFAULT_CONGESTION, help="TCP congestion control (default: %(default)s)")
    rate = actions.add_parser("rate", help="change the rate of all links of a set")
    rate.add_argument("prefix")
    rate.add_argument("rate")
    for action, text in (("show", "addresses, counters, limits"), ("down", "remove a set")):
        actions.add_parser(action, help=text).add_argument("prefix")
    run = actions.add_parser("exec", help="run a command inside a host")
    run.add_argument("prefix")
    run.add_argument("host", type=int)
    run.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.action == "up":
            hosts = Hosts(
                chosen.count,
                chosen.rate,
                prefix=chosen.prefix,
                burst=chosen.burst,
                queue=chosen.queue,
                congestion=chosen.congestion,
            )
            hosts.up()
            print(hosts.prefix)
            return 0
        hosts = Hosts.attach(chosen.prefix)
        if chosen.action == "rate":
            hosts.set_rate(chosen.rate)
        elif chosen.action == "show":
            print(hosts.describe())
        elif chosen.action == "down":
            hosts.down()
        elif chosen.command:
            return subprocess.run(hosts.command(chosen.host, chosen.command), check=False).returncode
        else:
            raise ValueError("exec needs a command, e.g. `exec PREFIX 0 ip address`.")
    except (HostsError, ValueError) as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
