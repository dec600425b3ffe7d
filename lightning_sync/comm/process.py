"""Whether another process of this machine is alive, stopped, or gone."""

import os
import socket
import sys
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "gone", "unknown"]


def identity() -> str:
    """Name this process so that `state_of` can look for it: what its process id means, and the id.

    Process ids of two containers, or of two machines of one name, mean different things.
    """
    return f"{os.getpid()} {_space()}"


def state_of(name: str) -> State:
    """What has become of the process that called itself ``name``; "unknown" if it is not of this machine."""
    pid, _, space = name.partition(" ")
    if space != _space() or not pid.isdecimal():
        return "unknown"
    if not sys.platform.startswith("linux"):
        return "unknown"  # a killed process stays visible until its parent has asked for it
    try:
        # The name of the program stands in brackets and may itself hold any character.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"
    except (OSError, IndexError):
        return "unknown"
    if state in "ZXx":
        return "gone"
    return "stopped" if state in "Tt" else "running"


def _space() -> str:
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return "/".join(parts)
