#!/usr/bin/env python3
"""Bytes on the wire of the strict mode: counted by the strategy, predicted by it, and seen by the interfaces.

    sudo python recipes/bench/bytes.py none bf16 fp16 int8 "PowerSGD(rank=4, warmup_steps=0)"

Trains a model of several MB a few steps with each compressor on 2 and on 4 ranks, one and two of them per host, and
compares, host by host, over the same steps. Exit status 1 if the predicted bytes are not the counted ones exactly, or
if an interface differs from the counted ones by more than 3 % plus 100 bytes a message. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hosts import UNLIMITED, Hosts, HostsError, bits_per_second, ending_on_sigterm
from methods import find, load_plugin
from session import CAPTION, Session, add_job_options, job_from

LAYOUTS = ["2x1", "2x2", "4x1", "4x2"]  # world size x ranks per host
RELATIVE_TOLERANCE = 0.03  # headers of full segments, acknowledgements
BYTES_PER_MESSAGE = 100  # headers of a message of its own: gloo's, TCP's, IP's, Ethernet's
HEAD = (
    f"| {'method':<32} | {'layout':<18} | host | predicted  | counted    | interface  | difference | allowed    "
    "| messages | verdict |"
)


@dataclass(frozen=True)
class HostBytes:
    """What left one host in the measured steps, all its ranks together.

    Attributes:
        method: Name of the method.
        world_size: Ranks of the run.
        ranks_per_host: Ranks of this host.
        host: Index of the host.
        steps: Measured steps.
        sent: Bytes handed to collectives that leave a rank, counted, inside the host or not.
        predicted_sent: The same, predicted.
        network: Bytes that leave the host, counted.
        predicted_network: The same, predicted.
        interface: Bytes sent by the host's interface.
        messages: Messages that leave the host's ranks, counted.
    """

    method: str
    world_size: int
    ranks_per_host: int
    host: int
    steps: int
    sent: int
    predicted_sent: float
    network: int
    predicted_network: float
    interface: int
    messages: int

    @property
    def allowed(self) -> float:
        """By how many bytes the interface may differ from the counted network bytes."""
        return RELATIVE_TOLERANCE * self.network + BYTES_PER_MESSAGE * self.messages

    def problems(self) -> list[str]:
        """What does not agree, in words; empty if all does."""
        found = []
        if self.predicted_sent != self.sent:
            found.append(f"sent: predicted {self.predicted_sent:.0f} B, counted {self.sent} B")
        if self.predicted_network != self.network:
            found.append(f"network: predicted {self.predicted_network:.0f} B, counted {self.network} B")
        if abs(self.interface - self.network) > self.allowed:
            found.append(
                f"interface {self.interface} B, counted {self.network} B: {self.interface - self.network:+d} B "
                f"where {self.allowed:.0f} B are allowed"
            )
        return found


def by_host(ranks: Sequence[dict[str, Any]]) -> list[HostBytes]:
    """Put the measurements of one trial's ranks together host by host.

    Args:
        ranks: As `Session.measured` returns them, all ranks of a trial.

    Raises:
        ValueError: The strategy keeps no counters or predicts nothing.
    """
    for rank in ranks:
        missing = {"wire_bytes", "network_bytes", "messages"} - rank["counted"].keys()
        if missing or not rank["predicted"]:
            lacks = ", ".join(sorted(f"counters.{name}" for name in missing)) or "predicted_bytes()"
            raise ValueError(f"method={rank['method']!r} cannot be checked: its strategy has no {lacks}.")
    hosts = []
    for host in sorted({rank["place"]["host"] for rank in ranks}):
        own = [rank for rank in ranks if rank["place"]["host"] == host]
        place, steps = own[0]["place"], own[0]["steps"]
        hosts.append(
            HostBytes(
                method=own[0]["method"],
                world_size=place["world_size"],
                ranks_per_host=place["ranks_per_host"],
                host=host,
                steps=steps,
                sent=sum(rank["counted"]["wire_bytes"] for rank in own),
                predicted_sent=steps * sum(rank["predicted"]["sent"] for rank in own),
                network=sum(rank["counted"]["network_bytes"] for rank in own),
                predicted_network=steps * sum(rank["predicted"]["network"] for rank in own),
                interface=own[0]["interface"]["tx_bytes"],
                messages=sum(rank["counted"]["messages"] for rank in own),
            )
        )
    return hosts


def read_layout(text: str) -> tuple[int, int]:
    """World size and ranks per host from a text such as `4x2`.

    Raises:
        ValueError: The text is not of this form, or the ranks do not fill the hosts.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    world_size, ranks_per_host = (int(match[1]), int(match[2])) if match else (0, 0)
    if ranks_per_host < 1 or world_size < 1 or world_size % ranks_per_host:
        raise ValueError(f"layout={text!r} is not accepted: RANKSxRANKS_PER_HOST that divides evenly, e.g. '4x2'.")
    return world_size, ranks_per_host


def line(row: HostBytes) -> str:
    """One line of the table, bytes per host and step."""
    cells = [row.predicted_network, row.network, row.interface, row.interface - row.network, row.allowed]
    numbers = " | ".join(f"{cell / row.steps:>10.0f}" for cell in cells) + f" | {row.messages / row.steps:>8.1f}"
    verdict = "DIFFERS" if row.problems() else "agrees"
    layout = f"{row.world_size} ranks, {row.ranks_per_host} a host"
    return f"| {row.method:<32} | {layout:<18} | {row.host:>4} | {numbers} | {verdict} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description=f"Counted, predicted and interface bytes of strict mode ({CAPTION}).")
    parser.add_argument("compressors", nargs="+", help="names as for strict:COMPRESSOR, or Class(key=value)")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="ranks x ranks per host (default: %(default)s)")
    parser.add_argument("--rate", default=UNLIMITED, help="rate of the links (default: %(default)s)")
    add_job_options(parser, width=128, compute_ms=20, warmup=3, steps=5)
    chosen = parser.parse_args(arguments)
    rows: list[HostBytes] = []
    failures: list[str] = []
    try:
        for file in chosen.plugin:
            load_plugin(file)
        methods = [f"strict:{name}" for name in chosen.compressors]
        for name in methods:
            find(name)
        bits_per_second(chosen.rate)
        job = job_from(chosen)
        layouts = [read_layout(text) for text in chosen.layouts]
        print(f"Network bytes per host and step. {CAPTION}.\n\n{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
        with ending_on_sigterm():
            for world_size, ranks_per_host in layouts:
                with (
                    Hosts(world_size // ranks_per_host, chosen.rate) as hosts,
                    Session(methods, job, chosen.plugin) as session,
                ):
                    status = session.run(hosts, ranks_per_host)
                    for number, name in enumerate(methods):
                        ranks, failure = session.measured(number)
                        where = f"{name} with {world_size} ranks, {ranks_per_host} a host"
                        if failure is not None or len(ranks) != world_size:
                            failures.append(f"{where}: {failure or f'no result (launcher status {status})'}")
                            continue
                        own = by_host(ranks)
                        rows += own
                        failures += [
                            f"{where}, host {row.host}: {problem}" for row in own for problem in row.problems()
                        ]
                        print("\n".join(line(row) for row in own), flush=True)
    except (HostsError, ValueError) as error:
        print(f"bytes: {error}", file=sys.stderr)
        return 2
    if chosen.json is not None:
        report = {"caption": CAPTION, "job": asdict(job), "rows": [asdict(row) for row in rows], "failures": failures}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    for failure in failures:
        print(f"bytes: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
