"""What one rank finds on its host, as plain values that travel as JSON."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_sync.cluster.network import interface_addresses, interface_towards, is_port_free, resolve
from lightning_sync.cluster.newest import newest_checkpoint
from lightning_sync.cluster.slurm import Job

_PACKAGES = ("torch", "lightning", "lightning-sync")


@dataclass(frozen=True)
class Facts:
    """What one rank finds.

    Attributes:
        rank: Its number.
        local_rank: Its number on its node.
        node_rank: Number of its node.
        host: Name of its host.
        accelerator: ``cuda`` or ``cpu``.
        visible_gpus: GPUs that it sees.
        backend: The backend of its process group.
        has_backend: Whether its torch was built with that.
        master: Name or address of rank 0's host.
        master_address: Its IPv4 address as seen from here; None if the name cannot be resolved.
        port: Port of rank 0's store.
        port_free: On rank 0, whether that is free; else None.
        interface: By which packets to the master leave; None without a route.
        addresses: IPv4 addresses of all interfaces, by name.
        gloo_interface: GLOO_SOCKET_IFNAME; None if not set.
        nccl: All NCCL_ variables.
        versions: Of Python and of the packages that must be the same everywhere.
        folder_problem: Why the run directory cannot be written to; empty if it can.
        resume: The newest complete checkpoint in the run directory.
    """

    rank: int
    local_rank: int
    node_rank: int
    host: str
    accelerator: str = "cpu"
    visible_gpus: int = 0
    backend: str = "gloo"
    has_backend: bool = True
    master: str = "localhost"
    master_address: str | None = "127.0.0.1"
    port: int = 15000
    port_free: bool | None = None
    interface: str | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    gloo_interface: str | None = None
    nccl: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    folder_problem: str = ""
    resume: str | None = None


def gather_facts(job: Job, run_dir: Path, accelerator: str, environ: Mapping[str, str]) -> Facts:
    """Look around on this host; starts nothing and changes nothing.

    Args:
        job: This process's job.
        run_dir: The run directory.
        accelerator: ``cuda``, ``gpu``, ``cpu``, or ``auto``: cuda where torch sees a device.
        environ: The process's environment.
    """
    if accelerator in ("auto", "gpu"):
        accelerator = "cuda" if accelerator == "gpu" or torch.cuda.is_available() else "cpu"
    backend = "nccl" if accelerator == "cuda" else "gloo"
    master = environ.get("MASTER_ADDR") or job.first_host
    port = int(environ.get("MASTER_PORT") or job.port)
    addresses = interface_addresses()
    return Facts(
        rank=job.rank,
        local_rank=job.local_rank,
        node_rank=job.node_rank,
        host=socket.gethostname(),
        accelerator=accelerator,
        visible_gpus=visible_gpus(environ),
        backend=backend,
        has_backend=dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available(),
        master=master,
        master_address=resolve(master),
        port=port,
        port_free=is_port_free(port) if job.rank == 0 else None,
        interface=interface_towards(master, addresses),
        addresses=addresses,
        gloo_interface=environ.get("GLOO_SOCKET_IFNAME") or None,
        nccl={name: value for name, value in environ.items() if name.startswith("NCCL_")},
        versions=versions(),
        folder_problem=folder_problem(run_dir),
        resume=newest_checkpoint(run_dir),
    )


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs SLURM shows to this task (its CUDA_VISIBLE_DEVICES), else how many torch sees."""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return torch.cuda.device_count()
    return len([device for device in shown.split(",") if device.strip() not in ("", "NoDevFiles", "-1")])


def versions() -> dict[str, str]:
    """Versions that must be the same on all ranks."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def folder_problem(run_dir: Path) -> str:
    """Why a run directory, or the folder it will be made in, cannot be written to; empty if it can."""
    folder = run_dir if run_dir.is_dir() else run_dir.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{folder}: {os.strerror(error.errno) if error.errno else error}"
    return ""
