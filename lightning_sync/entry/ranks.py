"""Who starts the ranks of a run, and how many there are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_sync.entry.errors import UsageError

CPU_PROCESSES = 2


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        starter: ``torchrun`` or ``slurm``, which have started all ranks already; ``self`` when the first process of a
            node starts the others.
        accelerator: ``cuda``, ``cpu``, or what the user asked for.
        devices: Ranks per node.
        num_nodes: Nodes.
    """

    starter: Literal["self", "torchrun", "slurm"]
    accelerator: str
    devices: int | str | list[int]
    num_nodes: int

    @property
    def count(self) -> int:
        """Ranks in all, as far as it is known before Lightning has counted the devices itself."""
        if isinstance(self.devices, str):
            return torch.cuda.device_count() * self.num_nodes
        per_node = len(self.devices) if isinstance(self.devices, list) else self.devices
        return per_node * self.num_nodes

    @property
    def relaunches(self) -> bool:
        """Whether this process starts others with its own command line."""
        return self.starter == "self" and self.count > self.num_nodes


def find_ranks(accelerator: str, devices: Any, num_nodes: Any) -> Ranks:
    """Fill in ``auto`` from srun, torchrun or this machine.

    Args:
        accelerator: Lightning's name; ``auto`` is ``cuda`` where there is a CUDA device, else ``cpu``.
        devices: Ranks per node (a number), or ``auto``. A list of device indices or a string as Lightning understands
            it (``"0,1"``, ``-1``) is passed on.
        num_nodes: Nodes, or ``auto``.

    Returns:
        The ranks.

    Raises:
        UsageError: If a value is not one of these, or a GPU is asked for where there is none.
    """
    cuda = torch.cuda.is_available()
    if accelerator == "auto":
        accelerator = "cuda" if cuda else "cpu"
    if accelerator in ("gpu", "cuda") and not cuda:
        raise UsageError(
            f"trainer.accelerator={accelerator}: torch sees no CUDA device here; accepted here: cpu, auto. "
            "On a GPU machine check the driver, CUDA_VISIBLE_DEVICES and that torch is built for CUDA.",
            on_all=False,
        )
    starter = _starter()
    nodes = _external_nodes(starter) if num_nodes == "auto" else num_nodes
    _check_count("trainer.num_nodes", nodes)
    if devices == "auto":
        devices = _auto_devices(starter, accelerator, nodes)
    elif isinstance(devices, bool) or not isinstance(devices, (int, str, list)) or devices == 0:
        raise UsageError(
            f"trainer.devices={devices}: accepted: auto, a number of ranks per node, or a list of devices."
        )
    if accelerator == "cpu":
        _check_count("trainer.devices", devices)
    elif devices == -1:
        devices = torch.cuda.device_count()
    return Ranks(starter, accelerator, devices, nodes)


def limit_threads(ranks: Ranks) -> None:
    """Give each CPU process one thread where several share this machine; OMP_NUM_THREADS overrides it.

    Args:
        ranks: The ranks of this run. Nothing is done unless this process starts the others.
    """
    if ranks.relaunches and ranks.accelerator == "cpu":
        # The environment is for the processes still to be started; this one has read it already.
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def _starter() -> Literal["self", "torchrun", "slurm"]:
    # Lightning's own order: torchrun inside an allocation wins.
    if TorchElasticEnvironment.detect():
        return "torchrun"
    return "slurm" if SLURMEnvironment.detect() else "self"


def _external_nodes(starter: str) -> int:
    if starter == "torchrun":
        return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_NNODES", "1")) if starter == "slurm" else 1


def _auto_devices(starter: str, accelerator: str, nodes: int) -> int | str:
    if starter == "torchrun":
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if starter == "slurm":
        return int(os.environ["SLURM_NTASKS"]) // nodes
    if accelerator == "cpu":
        return CPU_PROCESSES
    return torch.cuda.device_count() if accelerator in ("gpu", "cuda") else "auto"


def _check_count(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key}={value}: accepted: auto or a whole number from 1.")
