"""What may be wrong with a job: pure functions from what was found to findings, each with its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_sync.cluster.facts import Facts
from lightning_sync.cluster.network import is_loopback
from lightning_sync.cluster.slurm import INTERACTIVE, Job

_SKEW = 5.0  # seconds: more than makes no sense between hosts that synchronise their clocks
_SLOWING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


@dataclass(frozen=True)
class Finding:
    """Something that is not as it must be.

    Attributes:
        check: Which check found it.
        where: Which rank, or ``job``.
        expected: What it must be.
        found: What it is.
        fix: What to do.
        fatal: Whether the run cannot start like this; else it is a warning.
    """

    check: str
    where: str
    expected: str
    found: str
    fix: str
    fatal: bool = True

    def __str__(self) -> str:
        kind = "error" if self.fatal else "warning"
        return f"{kind} ({self.check}, {self.where}): expected {self.expected}; found {self.found}. {self.fix}"


def shape_findings(job: Job, devices: int | None, num_nodes: int | None) -> list[Finding]:
    """What is wrong with how the job was started; every rank finds the same.

    Args:
        job: This process's job.
        devices: Ranks per node that the Trainer is given; None if it takes what SLURM has.
        num_nodes: Its nodes; None likewise.
    """
    findings = []
    per_node = job.tasks // job.nodes

    def add(check: str, expected: str, found: str, fix: str) -> None:
        findings.append(Finding(check, "job", expected, found, fix))

    if job.tasks > 1 and job.step is None:
        add(
            "srun",
            f"{job.tasks} processes, started by srun",
            "one process, started by the batch script itself",
            "Put srun before the command: srun python ...",
        )
        return findings
    if job.tasks > 1 and job.interactive:
        add(
            "job name",
            f"a name other than {' or '.join(INTERACTIVE)}",
            f"--job-name={job.name}, in which Lightning does not use srun's tasks",
            "Give the job another name: #SBATCH --job-name=train",
        )
    if job.tasks % job.nodes:
        add(
            "tasks",
            "the same number of tasks on every node",
            f"{job.tasks} tasks on {job.nodes} nodes",
            "Use --nodes and --ntasks-per-node, not --ntasks.",
        )
    elif job.tasks > 1 and job.tasks_per_node is None:
        add(
            "tasks",
            f"--ntasks-per-node={per_node}",
            f"--ntasks={job.tasks}, which Lightning refuses",
            f"Replace --ntasks={job.tasks} by --nodes={job.nodes} --ntasks-per-node={per_node}.",
        )
    elif devices is not None and devices != per_node:
        add(
            "tasks per node",
            f"--ntasks-per-node={devices}, one task per device (trainer.devices={devices})",
            f"{per_node} tasks per node",
            f"Use --ntasks-per-node={devices}, or trainer.devices={per_node} (or auto).",
        )
    if num_nodes is not None and num_nodes != job.nodes:
        add(
            "nodes",
            f"--nodes={num_nodes} (trainer.num_nodes={num_nodes})",
            f"--nodes={job.nodes}",
            f"Use --nodes={num_nodes}, or trainer.num_nodes={job.nodes} (or auto).",
        )
    return findings


def rank_findings(facts: Facts, job: Job) -> list[Finding]:
    """What is wrong on one rank's host.

    Args:
        facts: What the rank has found.
        job: Its job.
    """
    where = f"rank {facts.rank} on {facts.host}"
    findings = [*_device_findings(facts, job, where), *_network_findings(facts, job, where)]
    if facts.folder_problem:
        findings.append(
            Finding(
                "run directory",
                where,
                "a run directory that can be written to",
                facts.folder_problem,
                "Give run_dir=PATH on a file system that all nodes share and that you may write to.",
            )
        )
    return findings


def _device_findings(facts: Facts, job: Job, where: str) -> list[Finding]:
    findings = []
    per_node = job.tasks // job.nodes
    if facts.accelerator == "cuda" and facts.visible_gpus < per_node:
        one_each = facts.visible_gpus == 1
        found = "1 GPU, bound to this task" if one_each else f"{facts.visible_gpus} GPUs"
        fix = (
            "Lightning numbers a node's GPUs by local rank, so every task must see them all: use "
            f"--gres=gpu:{per_node} (or --gpus-per-node={per_node}) without --gpus-per-task, or srun --gpu-bind=none."
            if one_each
            else f"Ask for as many GPUs as tasks: --gres=gpu:{per_node} with --ntasks-per-node={per_node}."
        )
        findings.append(Finding("GPUs", where, f"{per_node} visible GPUs", found, fix))
    if facts.accelerator == "cpu" and facts.visible_gpus:
        fix = "Check the driver and that torch is built for CUDA; if CPUs are meant, submit with --gres=none."
        found = f"{facts.visible_gpus} GPUs from SLURM, of which torch uses none"
        findings.append(Finding("GPUs", where, "training on the job's GPUs", found, fix, False))
    if not facts.has_backend:
        fix = (
            "Install a torch that is built for CUDA, or use trainer.accelerator=cpu."
            if facts.backend == "nccl"
            else "Install a torch that is built with gloo."
        )
        findings.append(Finding("backend", where, f"torch with {facts.backend}", "torch without it", fix))
    for name in _SLOWING:
        if facts.accelerator == "cuda" and facts.nccl.get(name, "0") not in ("", "0"):
            fix = f"It makes NCCL slow; unset {name} unless you know why it is there."
            findings.append(Finding("NCCL variables", where, f"no {name}", f"{name}={facts.nccl[name]}", fix, False))
    return findings


def _network_findings(facts: Facts, job: Job, where: str) -> list[Finding]:
    findings = []

    def add(check: str, expected: str, found: str, fix: str, fatal: bool = True) -> None:
        findings.append(Finding(check, where, expected, found, fix, fatal))

    if facts.port_free is False:
        add(
            "port",
            f"port {facts.port} to be free on {facts.host}",
            "another process listens there",
            f"Choose another: export MASTER_PORT={10000 + (facts.port + 1373) % 20000}, before srun.",
        )
    if job.nodes == 1:
        return findings
    if facts.master_address is None:
        add(
            "master address",
            f"an address for {facts.master}, the host of rank 0",
            "a name that cannot be resolved",
            "export MASTER_ADDR=ADDRESS before srun, with an address of the first node that all nodes reach.",
        )
    elif is_loopback(facts.master_address):
        add(
            "master address",
            f"an address of {facts.master} that other nodes reach",
            f"{facts.master_address}, the loopback interface",
            f"/etc/hosts or MASTER_ADDR names {facts.master} so; export MASTER_ADDR=ADDRESS before srun.",
        )
    elif facts.rank == 0 and facts.master_address not in facts.addresses.values() and facts.addresses:
        add(
            "master address",
            f"an address of {facts.host}, where rank 0 runs",
            f"MASTER_ADDR={facts.master}, another host's",
            f"Leave MASTER_ADDR unset, or set it to the first node: {job.first_host}.",
        )
    by_route = facts.interface or "the interface that leads to the other nodes (ip route)"
    fix = f"export GLOO_SOCKET_IFNAME={by_route}, or leave it unset: it is found by itself."
    for name in facts.gloo_interface.split(",") if facts.gloo_interface else ():
        address = facts.addresses.get(name)
        if not facts.addresses:
            continue
        if address is None:
            add(
                "interface",
                f"GLOO_SOCKET_IFNAME to be one of {', '.join(facts.addresses)}",
                f"GLOO_SOCKET_IFNAME={name}, which does not exist here or has no address (patterns are NCCL's only)",
                fix,
            )
        elif is_loopback(address):
            add(
                "interface",
                f"GLOO_SOCKET_IFNAME={by_route}",
                f"GLOO_SOCKET_IFNAME={name}, by which no other node can be reached",
                fix,
            )
        elif name != facts.interface:
            found = f"GLOO_SOCKET_IFNAME={name}; packets to {facts.master} leave by {facts.interface}"
            add("interface", f"GLOO_SOCKET_IFNAME={by_route}", found, fix, False)
    nccl = facts.nccl.get("NCCL_SOCKET_IFNAME")
    if facts.accelerator == "cuda" and nccl and facts.addresses and not _nccl_matches(nccl, facts.addresses):
        add(
            "interface",
            f"NCCL_SOCKET_IFNAME to match one of {', '.join(_usable(facts.addresses))}",
            f"NCCL_SOCKET_IFNAME={nccl}, which matches none that leads to other nodes",
            f"export NCCL_SOCKET_IFNAME={by_route}, or leave it unset.",
        )
    return findings


def _usable(addresses: Mapping[str, str]) -> list[str]:
    return [name for name, address in addresses.items() if not is_loopback(address)]


def _nccl_matches(pattern: str, addresses: Mapping[str, str]) -> bool:
    """NCCL's own rule: names or beginnings of names; ``=`` for whole names, ``^`` for all but these."""
    inverted, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    names = pattern.lstrip("^=").split(",")

    def hit(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(hit(interface) is not inverted for interface in _usable(addresses))


def common_findings(everyone: Sequence[Facts], skews: Mapping[int, float], job: Job) -> list[Finding]:
    """What is wrong between ranks.

    Args:
        everyone: What every rank has found, rank 0 first.
        skews: Seconds by which a rank's clock is ahead of rank 0's.
        job: The job.
    """
    findings = []
    first = everyone[0]
    for facts in everyone[1:]:
        where = f"rank {facts.rank} on {facts.host}"
        for name, wanted in first.versions.items():
            if facts.versions.get(name) != wanted:
                found = f"{name} {facts.versions.get(name)}"
                fix = "Start every node from the same environment or container image."
                findings.append(Finding("versions", where, f"{name} {wanted}, as on rank 0", found, fix))
        if facts.resume != first.resume:
            expected = f"the checkpoint that rank 0 resumes from ({first.resume})"
            fix = "The run directory differs between nodes: give run_dir=PATH on a shared file system."
            findings.append(Finding("run directory", where, expected, str(facts.resume), fix))
        if facts.nccl != first.nccl and facts.accelerator == "cuda":
            expected = f"rank 0's NCCL variables {first.nccl}"
            fix = "Export them before srun, not in a node's profile."
            findings.append(Finding("NCCL variables", where, expected, str(facts.nccl), fix, False))
        if abs(skews.get(facts.rank, 0.0)) > _SKEW:
            found = f"{skews[facts.rank]:+.1f} s"
            fix = "Logs and times of files will not fit together; have the clocks synchronised (chrony, ntpd)."
            findings.append(Finding("clock", where, f"rank 0's clock, give or take {_SKEW:g} s", found, fix, False))
    hosts = {facts.host for facts in everyone}
    if len(hosts) != job.nodes:
        fix = "Two nodes have the same host name, or tasks were placed otherwise (--distribution, --overlap)."
        findings.append(Finding("nodes", "job", f"{job.nodes} hosts", f"{len(hosts)}: {sorted(hosts)}", fix, False))
    return findings
