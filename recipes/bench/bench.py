#!/usr/bin/env python3
"""Training steps between emulated hosts, methods side by side: time, bytes, and what the network costs.

    sudo python recipes/bench/bench.py --hosts 4 --rate 100mbit 1gbit
    sudo python recipes/bench/bench.py --hosts 2 --ranks-per-host 2 --rate 1gbit --methods ddp5 strict:int8@5
    sudo python recipes/bench/bench.py --hosts 2 --model lm --plugin mine.py --methods ddp mine --json out.json

Needs root and iproute2. What is emulated and how to read the table: README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hosts import Hosts, HostsError, bits_per_second, ending_on_sigterm
from methods import find, load_plugin
from session import CAPTION, Session, add_job_options, job_from
from trial import Job, versions

ALONE = "none"
DEFAULT_METHODS = [
    *("none", "ddp", "ddp5", "ddp5-fp16", "torch-powersgd1", "torch-powersgd4"),
    *("strict", "strict:bf16", "strict:int8", "strict:powersgd"),
]


@dataclass(frozen=True)
class Row:
    """One method at one rate. Times in milliseconds, bytes in MB (1e6) per rank and step, medians over the rounds.

    Attributes:
        method: Name.
        rate: Rate of the links.
        median_ms: Median of the rounds' median step.
        mean_ms: Median of the rounds' mean step.
        spread_ms: Fastest and slowest round.
        ratio: Time per step over the baseline's in the same round: median of the rounds. Below 1 is faster.
        ratio_spread: Smallest and largest of the rounds' ratios.
        exposed_ms: Step minus compute alone, in the same round: what the method adds to a step.
        interface_mb: Sent by a host's interface, divided by its ranks; mean of the hosts.
        counted_mb: Sent according to the strategy's own counters; None if it keeps none.
        wire_ms: Time that the busiest interface's bytes need at the link's rate; None for an unlimited link.
        wire_over_compute: `wire_ms` over compute alone: above 1, no overlap can hide the transfer.
        other_cores: Cores that anything but the ranks kept busy: what disturbed the measurement.
        failure: Why the method gave no numbers; None if it did.
    """

    method: str
    rate: str
    median_ms: float | None = None
    mean_ms: float | None = None
    spread_ms: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_spread: tuple[float, float] | None = None
    exposed_ms: float | None = None
    interface_mb: float | None = None
    counted_mb: float | None = None
    wire_ms: float | None = None
    wire_over_compute: float | None = None
    other_cores: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Round:
    """One trial of one method, its ranks put together."""

    median_ms: float
    mean_ms: float
    step_ms: float
    interface_mb: float
    busiest_bytes: float
    counted_mb: float | None
    other_cores: float

    @classmethod
    def of(cls, ranks: Sequence[dict[str, Any]], period: int) -> Round:
        """Put the ranks' measurements together: the slowest rank's time, the mean host's bytes."""
        hosts = {rank["place"]["host"]: rank["interface"] for rank in ranks}
        steps, per_host = ranks[0]["steps"], ranks[0]["place"]["ranks_per_host"]
        counted = [rank["counted"].get("wire_bytes") for rank in ranks]
        median, mean = max(rank["median_ms"] for rank in ranks), max(rank["mean_ms"] for rank in ranks)
        others = max(rank["machine_cpu_s"] for rank in ranks) - sum(rank["own_cpu_s"] for rank in ranks)
        return cls(
            median_ms=median,
            mean_ms=mean,
            step_ms=median if period == 1 else mean,
            interface_mb=statistics.fmean(host["tx_bytes"] for host in hosts.values()) / per_host / steps / 1e6,
            busiest_bytes=max(max(host["tx_bytes"], host["rx_bytes"]) for host in hosts.values()) / steps,
            counted_mb=None if None in counted else statistics.fmean(counted) / steps / 1e6,
            other_cores=max(0.0, 1000 * others / (mean * steps)),
        )


def summarise(rounds: dict[str, list[Round | None]], failures: dict[str, str], baseline: str, rate: str) -> list[Row]:
    """Turn the rounds of all methods at one rate into rows.

    Args:
        rounds: By method, one entry per round, None where it did not finish; all lists are equally long.
        failures: By method, why it failed.
        baseline: Method that ratios refer to.
        rate: Rate of the links.

    Returns:
        A row for each method, in the order of `rounds`. A method that failed in any round gets no numbers.
    """
    bits = bits_per_second(rate)
    rows = []
    for name, own in rounds.items():
        if name in failures or None in own:
            rows.append(Row(name, rate, failure=failures.get(name, "no result")))
            continue
        ratios = [a.step_ms / b.step_ms for a, b in zip(own, rounds[baseline], strict=True) if a and b]
        pairs = [(a, b) for a, b in zip(own, rounds[ALONE], strict=True) if a and b]
        done = [one for one in own if one is not None]
        wire_ms = None if bits is None else statistics.median(8e3 * one.busiest_bytes / bits for one in done)
        compute_ms = statistics.median(b.step_ms for _, b in pairs) if pairs else None
        rows.append(
            Row(
                name,
                rate,
                median_ms=statistics.median(one.median_ms for one in done),
                mean_ms=statistics.median(one.mean_ms for one in done),
                spread_ms=(min(one.step_ms for one in done), max(one.step_ms for one in done)),
                ratio=statistics.median(ratios) if ratios else None,
                ratio_spread=(min(ratios), max(ratios)) if ratios else None,
                exposed_ms=statistics.median(a.step_ms - b.step_ms for a, b in pairs) if pairs else None,
                interface_mb=statistics.median(one.interface_mb for one in done),
                counted_mb=statistics.median(one.counted_mb or 0 for one in done)
                if all(one.counted_mb is not None for one in done)
                else None,
                wire_ms=wire_ms,
                wire_over_compute=wire_ms / compute_ms if wire_ms is not None and compute_ms else None,
                other_cores=statistics.median(one.other_cores for one in done),
            )
        )
    return rows


def table(rows: Sequence[Row], caption: str, baseline: str) -> str:
    """The rows of one rate as a Markdown table under its caption."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def spread(value: tuple[float, float] | None, digits: int) -> str:
        return "-" if value is None else f"{value[0]:.{digits}f} to {value[1]:.{digits}f}"

    head = [
        *("method", "median ms", "mean ms", "rounds, ms", f"time / {baseline}", "rounds", "exposed ms"),
        *("MB sent, interface", "MB sent, counted", "wire / compute", "other CPU"),
    ]
    lines = [head]
    for row in rows:
        if row.failure is not None:
            lines.append([row.method, f"FAILED: {row.failure.splitlines()[0][:160]}", *[""] * (len(head) - 2)])
            continue
        lines.append(
            [
                row.method,
                number(row.median_ms, 1),
                number(row.mean_ms, 1),
                spread(row.spread_ms, 1),
                number(row.ratio, 3),
                spread(row.ratio_spread, 3),
                number(row.exposed_ms, 1),
                number(row.interface_mb, 3),
                number(row.counted_mb, 3),
                number(row.wire_over_compute, 2),
                number(row.other_cores, 1),
            ]
        )
    widths = [max(len(line[i]) for line in lines if not line[1].startswith("FAILED")) for i in range(len(head))]
    widths[0] = max(len(line[0]) for line in lines)
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return f"{caption}\n\n" + "\n".join(text)


def describe(job: Job, hosts: int, ranks_per_host: int, rate: str, rounds: int, compute_ms: float | None) -> str:
    """The caption of a table: what was run, in one paragraph."""
    alone = "not measured" if compute_ms is None else f"{compute_ms:.1f} ms a step"
    return (
        f"{job.model} (width {job.width}, {job.layers} layers), {hosts} hosts x {ranks_per_host} ranks, links {rate}; "
        f"{rounds} interleaved rounds of {job.steps} steps after {job.warmup} of warm-up. Compute alone: {alone}. "
        f"MB per rank and step. {CAPTION}."
    )


def run_rate(chosen: argparse.Namespace, hosts: Hosts, methods: Sequence[str]) -> tuple[list[Row], list[Any], int]:
    """Run all rounds at the rate that the hosts have; returns rows, raw measurements and the launcher's status."""
    job = job_from(chosen)
    with Session(list(methods) * chosen.rounds, job, chosen.plugin) as session:
        status = session.run(hosts, chosen.ranks_per_host)
        rounds: dict[str, list[Round | None]] = {name: [] for name in methods}
        failures: dict[str, str] = {}
        raw = []
        for number, name in enumerate(session.trials):
            ranks, failure = session.measured(number)
            if failure is not None:
                failures.setdefault(name, failure)
            complete = len(ranks) == hosts.count * chosen.ranks_per_host
            rounds[name].append(Round.of(ranks, find(name).period) if complete else None)
            raw.append({"rate": hosts.rate, "round": number // len(methods), "method": name, "ranks": ranks})
    return summarise(rounds, failures, chosen.baseline, hosts.rate), raw, status


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description=f"Methods side by side between emulated hosts ({CAPTION}).")
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rate", nargs="+", default=["100mbit"], help="e.g. 100mbit 1gbit unlimited")
    parser.add_argument("--methods", nargs="+", default=DEFAULT_METHODS, metavar="METHOD", help="default: %(default)s")
    parser.add_argument("--baseline", help="method that ratios refer to (default: the first that communicates)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    add_job_options(parser)
    chosen = parser.parse_args(arguments)
    try:
        for file in chosen.plugin:
            load_plugin(file)
        methods = list(dict.fromkeys([ALONE, *chosen.methods]))
        alone = {name for name in methods if find(name).alone}
        chosen.baseline = chosen.baseline or next((name for name in methods if name not in alone), ALONE)
        if chosen.baseline not in methods:
            raise ValueError(f"--baseline={chosen.baseline!r} is not among the methods: {', '.join(methods)}.")
        if chosen.rounds < 1:
            raise ValueError(f"--rounds={chosen.rounds!r} is not accepted: at least 1.")
        for rate in chosen.rate:
            bits_per_second(rate)
        job = job_from(chosen)
        rows: list[Row] = []
        raw: list[Any] = []
        statuses = []
        with ending_on_sigterm(), Hosts(chosen.hosts, chosen.rate[0]) as hosts:
            for rate in chosen.rate:
                hosts.set_rate(rate)
                began = time.monotonic()
                own, measured, status = run_rate(chosen, hosts, methods)
                compute = next(row.median_ms for row in own if row.method == ALONE)
                caption = describe(job, chosen.hosts, chosen.ranks_per_host, rate, chosen.rounds, compute)
                print(f"\n{table(own, caption, chosen.baseline)}\n({time.monotonic() - began:.0f} s)", flush=True)
                rows += own
                raw += measured
                statuses.append(status)
    except (HostsError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if chosen.json is not None:
        report = {
            "caption": CAPTION,
            "job": asdict(job),
            "hosts": chosen.hosts,
            "ranks_per_host": chosen.ranks_per_host,
            "baseline": chosen.baseline,
            "versions": versions(),
            "rows": [asdict(row) for row in rows],
            "trials": raw,
        }
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return max(statuses, default=0) or int(any(row.failure is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
