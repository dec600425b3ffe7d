"""Checks a SLURM job before any process group exists, so that what is wrong is said instead of hanging."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning_sync.cluster.facts import Facts, gather_facts
from lightning_sync.cluster.findings import Finding, common_findings, rank_findings, shape_findings
from lightning_sync.cluster.meeting import Gathered, MeetingError, attend_meeting, host_meeting
from lightning_sync.cluster.network import is_loopback
from lightning_sync.cluster.slurm import Job, current_job

log = logging.getLogger(__name__)

#: ``off`` skips the checks, a number is the deadline in seconds.
SWITCH = "LIGHTNING_SYNC_PREFLIGHT"
_DEADLINE = 180.0


class PreflightError(RuntimeError):
    """The job cannot run as it is; what is wrong was printed, with what to do.

    Args:
        findings: What is wrong.
    """

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        checks = ", ".join(dict.fromkeys(f.check for f in findings if f.fatal))
        super().__init__(f"preflight failed ({checks}); nothing was started. {SWITCH}=off skips the checks")


@dataclass(frozen=True)
class Report:
    """What the checks of a job have found.

    Attributes:
        findings: What is not as it must be.
        rows: A line per rank: where it runs and what it found.
    """

    findings: tuple[Finding, ...]
    rows: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the run may start."""
        return not any(f.fatal for f in self.findings)


def preflight(
    run_dir: str | os.PathLike[str] = "runs/preflight",
    *,
    devices: int | None = None,
    num_nodes: int | None = None,
    accelerator: str = "auto",
    deadline: float = _DEADLINE,
    measure_mb: int = 0,
    environ: MutableMapping[str, str] | None = None,
    out: TextIO | None = None,
) -> Report:
    """Check a job of SLURM: every rank calls it, with the same arguments, before a process group exists.

    Tasks and nodes against the Trainer's, srun, GPUs per task, address and port of rank 0, interfaces, versions,
    clocks, NCCL's variables, the backend, and whether the run directory is writable and shared. Where
    GLOO_SOCKET_IFNAME is not set in a job of several nodes, it is set to the interface that leads to rank 0. Errors and
    warnings are printed to stderr. Your own script calls it before it makes a Trainer.

    Args:
        run_dir: The run directory. Beside it rank 0 leaves a file for a moment, by which the others find it.
        devices: The Trainer's devices (a number); None: as many as there are tasks per node.
        num_nodes: The Trainer's nodes; None: the job's.
        accelerator: ``cuda``, ``cpu`` or ``auto``.
        deadline: Seconds for all ranks to arrive (180; LIGHTNING_SYNC_PREFLIGHT=SECONDS overrides it).
        measure_mb: MB that one rank of every other node sends to rank 0, to measure the network; 0: none.
        environ: The environment; None takes the process's own.
        out: Where rank 0 prints to; None: stderr.

    Returns:
        The report, the same on all ranks. Outside of SLURM, and with LIGHTNING_SYNC_PREFLIGHT=off, it is empty.

    Raises:
        PreflightError: Something is wrong; on all ranks.
        ValueError: LIGHTNING_SYNC_PREFLIGHT is neither ``off`` nor a number.
    """
    environ = os.environ if environ is None else environ
    job = current_job(environ)
    switch = environ.get(SWITCH, "")
    if job is None or switch == "off":
        return Report((), ())
    deadline = _seconds(switch, deadline)
    findings = shape_findings(job, devices, num_nodes)
    if findings:
        report = Report(tuple(findings), ())
        speaks = job.rank == 0
    else:
        facts = gather_facts(job, Path(run_dir), accelerator, environ)
        report, speaks = _meet(job, facts, Path(run_dir), deadline, measure_mb)
        if job.nodes > 1 and facts.interface and not facts.gloo_interface:
            environ["GLOO_SOCKET_IFNAME"] = facts.interface
    if speaks:
        for finding in report.findings:
            print(f"lightning-sync: {finding}", file=out or sys.stderr, flush=True)
    if not report.ok:
        raise PreflightError(list(report.findings))
    return report


def _seconds(switch: str, default: float) -> float:
    if not switch:
        return default
    try:
        return float(switch)
    except ValueError:
        raise ValueError(f"{SWITCH}={switch!r}: accepted: off, or a number of seconds.") from None


def _meet(job: Job, facts: Facts, run_dir: Path, deadline: float, measure_mb: int) -> tuple[Report, bool]:
    """The report of all ranks, and whether this one is to print it."""
    own = rank_findings(facts, job)
    if job.tasks == 1:
        return Report(tuple(own), (_row(facts, 0.0, None),)), True
    place = run_dir.parent / f".preflight-{job.number}.{job.step}.{job.restarts}.json"
    if job.rank:
        try:
            verdict = attend_meeting(place, job.rank, asdict(facts), deadline=deadline)
        except MeetingError as error:
            return Report((*own, _not_met(error, facts, run_dir)), ()), True
        return Report(tuple(Finding(**f) for f in verdict["findings"]), tuple(verdict["rows"])), False

    def judge(gathered: Gathered) -> Any:
        everyone = {rank: Facts(**words) for rank, words in sorted(gathered.words.items())}
        found = [finding for each in everyone.values() for finding in rank_findings(each, job)]
        found += common_findings(list(everyone.values()), gathered.skews, job)
        found += _absent(job, set(everyone), deadline)
        rows = [_row(f, gathered.skews.get(rank, 0.0), gathered.rates.get(rank)) for rank, f in everyone.items()]
        return {"findings": [asdict(f) for f in _merged(found)], "rows": rows}

    # One task of every other node measures; all tasks of a node share its link.
    per_node = job.tasks // job.nodes
    measured = range(per_node, job.tasks, per_node) if measure_mb else ()
    reachable = [a for a in facts.addresses.values() if job.nodes == 1 or not is_loopback(a)]
    try:
        verdict = host_meeting(
            place,
            asdict(facts),
            job.tasks,
            judge,
            addresses=reachable or [facts.host],
            deadline=deadline,
            measure=measured,
            measure_mb=measure_mb,
        )
    except OSError:  # the folder's finding says why
        verdict = judge(Gathered({0: asdict(facts)}, {}, {}))
    return Report(tuple(Finding(**f) for f in verdict["findings"]), tuple(verdict["rows"])), True


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding for all ranks of which the same is true."""
    merged: dict[tuple[Any, ...], list[Finding]] = {}
    for f in findings:
        merged.setdefault((f.check, f.expected, f.found, f.fix, f.fatal), []).append(f)
    return [
        same[0] if len(same) == 1 else Finding(f.check, "; ".join(s.where for s in same), *rest)
        for same in merged.values()
        for f in same[:1]
        for rest in [(f.expected, f.found, f.fix, f.fatal)]
    ]


def _absent(job: Job, here: set[int], deadline: float) -> list[Finding]:
    missing = sorted(set(range(job.tasks)) - here)
    if not missing:
        return []
    return [
        Finding(
            "meeting",
            "job",
            f"{job.tasks} ranks within {deadline:g} s",
            f"no sign of rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}",
            "Their own output says why; if they do not see rank 0's file, run_dir is not on a shared file system.",
        )
    ]


def _not_met(error: MeetingError, facts: Facts, run_dir: Path) -> Finding:
    where = f"rank {facts.rank} on {facts.host}"
    if error.unseen:
        fix = (
            f"Either {run_dir.parent} is not on a file system that all nodes share (give run_dir=PATH on one that is), "
            "or rank 0 has not come so far."
        )
        return Finding("run directory", where, "to see what rank 0 writes there", str(error), fix)
    fix = "Let the nodes' firewalls pass connections between them, or check the route to the first node."
    return Finding("meeting", where, "a connection to rank 0", str(error), fix)


def _row(facts: Facts, skew: float, rate: float | None) -> str:
    """What a rank found, for a reader."""
    parts = [
        f"rank {facts.rank} on {facts.host} (node {facts.node_rank}, local rank {facts.local_rank})",
        f"{facts.accelerator}/{facts.backend}",
        f"{facts.visible_gpus} GPUs visible",
        f"interface {facts.interface} towards {facts.master}:{facts.port}",
        f"clock {skew:+.3f} s",
        ", ".join(f"{name} {value}" for name, value in facts.versions.items()),
    ]
    if rate is not None:
        parts.append(f"{rate:,.0f} MB/s to rank 0")
    return "; ".join(parts)
