"""What SLURM says about this job and this task, from its environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

# Lightning starts its own ranks in jobs of these names, also inside an allocation.
INTERACTIVE = ("bash", "interactive")


@dataclass(frozen=True)
class Job:
    """A task of a SLURM job.

    Attributes:
        job: What ``scontrol`` knows it as: the job's id, or ``ARRAY_ELEMENT`` in a job array.
        number: ``SLURM_JOB_ID``, which is an element's own in an array.
        step: Number of the ``srun`` within the job, from 0; None outside of any.
        name: Its name.
        nodes: Nodes of the job (``--nodes``).
        tasks: Tasks of the job.
        tasks_per_node: ``--ntasks-per-node``; None if it was not given.
        rank: Number of this task in the job, from 0.
        local_rank: Its number on its node.
        node_rank: Number of its node.
        restarts: How often the job was started again, after a requeue or a failure of a node.
        hosts: ``SLURM_JOB_NODELIST``, for example ``node[1-4]``.
    """

    job: str
    number: str
    step: str | None
    name: str
    nodes: int
    tasks: int
    tasks_per_node: int | None
    rank: int
    local_rank: int
    node_rank: int
    restarts: int
    hosts: str

    @property
    def interactive(self) -> bool:
        """Whether Lightning takes it for a shell in which the user starts processes by hand."""
        return self.name in INTERACTIVE

    @property
    def first_host(self) -> str:
        """The host of rank 0."""
        return first_host(self.hosts)

    @property
    def port(self) -> int:
        """Lightning's choice of a port where MASTER_PORT is not set: 15000 + the last four digits of the id."""
        digits = self.number[-4:]
        return 15000 + int(digits) if digits.isdigit() else 12910


def current_job(environ: Mapping[str, str] = os.environ) -> Job | None:
    """The job that this process belongs to; None outside of SLURM.

    Args:
        environ: The process's environment.
    """
    number = environ.get("SLURM_JOB_ID")
    if not number:
        return None
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    nodes = _integer(environ, "SLURM_NNODES", 1)
    # Of a step that takes a part of the job only, the step's own number counts.
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS", _integer(environ, "SLURM_NTASKS", 1))
    per_node = environ.get("SLURM_NTASKS_PER_NODE")
    return Job(
        job=f"{array}_{element}" if array and element else number,
        number=number,
        step=environ.get("SLURM_STEP_ID"),
        name=environ.get("SLURM_JOB_NAME", ""),
        nodes=nodes,
        tasks=tasks,
        tasks_per_node=int(per_node) if per_node and per_node.isdigit() else None,
        rank=_integer(environ, "SLURM_PROCID", 0),
        local_rank=_integer(environ, "SLURM_LOCALID", 0),
        node_rank=_integer(environ, "SLURM_NODEID", 0),
        restarts=_integer(environ, "SLURM_RESTART_COUNT", 0),
        hosts=environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "")),
    )


def first_host(hosts: str) -> str:
    """The first name of a list such as ``gpu[03-07,9],login1`` or ``rack2-[1,4]-ib``.

    Args:
        hosts: As in ``SLURM_JOB_NODELIST``.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts.strip())
    if first is None:
        return "localhost"
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else default
