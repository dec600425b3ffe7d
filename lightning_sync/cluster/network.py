"""Which network interface leads where, on this host."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Mapping

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ANY_PORT = 9  # "discard"; a datagram socket that is connected sends nothing


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of every interface that has one; elsewhere than on Linux nothing."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface_towards(host: str, addresses: Mapping[str, str]) -> str | None:
    """The interface by which packets to a host leave, as the routing table has it; on that host, its own.

    Args:
        host: Name or address.
        addresses: Of this host's interfaces.

    Returns:
        One name; None if the host has no address, or there is no route to it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((host, _ANY_PORT))
            own = asking.getsockname()[0]
    except OSError:
        return None
    return next((name for name, address in addresses.items() if address == own), None)


def resolve(host: str) -> str | None:
    """The IPv4 address of a name; None if it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def is_port_free(port: int) -> bool:
    """Whether a server could listen on a port of this host now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trying:
        # As torch's store does: connections of a job that has just ended are no obstacle.
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind(("", port))
            trying.listen(1)
        except OSError:
            return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an address is one that other hosts cannot reach."""
    return address.startswith("127.")
