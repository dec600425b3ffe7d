#!/usr/bin/env python3
"""Does the advice hold? Predicted steps beside measured ones, between emulated hosts.

    sudo python recipes/bench/predictions.py --hosts 2 4 --rate 100mbit 1gbit

For every number of hosts and rate, `Probe` measures compute, links and codecs there, once, and predicts; then bench.py
measures the same methods. The table shows both and how far the prediction is off (CPU, gloo, emulated links; NCCL not
measured).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PERIOD, OVERLAP = 8, 6
# A method as bench.py knows it: mode, compressor, sync_every, overlap_steps of a `Candidate`.
METHODS: dict[str, tuple[str, str, int, int]] = {
    "strict:bf16": ("strict", "bf16", 1, 0),
    "strict:int8": ("strict", "int8", 1, 0),
    "strict:PowerSGD(rank=4,warmup_steps=0)": ("strict", "PowerSGD(rank=4,warmup_steps=0)", 1, 0),
    "delayed:PowerSGD(rank=1,warmup_steps=0)": ("delayed", "PowerSGD(rank=1,warmup_steps=0)", 1, 0),
    f"diloco(sync_every={PERIOD}):int8": ("periodic", "int8", PERIOD, 0),
    f"diloco(sync_every={PERIOD},overlap_steps={OVERLAP}):int8": ("periodic", "int8", PERIOD, OVERLAP),
}


def leg(options: argparse.Namespace) -> None:
    """One rank of the probe."""
    import torch
    from lightning.pytorch import Trainer

    import lightning_sync as ls
    from lightning_sync.monitor.probe import Probe
    from lightning_sync.planner.advise import Candidate
    from models import EmulatedCompute, loader

    torch.set_num_threads(1)

    def made(name: str) -> Any:
        if "(" not in name:
            return name
        fields = dict(pair.split("=") for pair in name[name.index("(") + 1 : -1].split(","))
        return ls.PowerSGD(**{key: int(value) for key, value in fields.items()})

    probe = Probe(steps=16, candidates=[Candidate(n, m, made(c), h, tau) for n, (m, c, h, tau) in METHODS.items()])
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=options.leg,
        strategy=ls.strategy("local_sgd", sync_every=10**6),
        callbacks=[probe],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=100,
    )
    trainer.fit(EmulatedCompute(256, 8, options.compute_ms), loader(100, 0))
    if trainer.is_global_zero:
        found = {p.candidate.name: 1e3 * p.seconds for p in probe.predictions}
        Path(options.out).write_text(json.dumps(found))


def predicted(hosts: int, rate: str, compute_ms: float, folder: Path) -> dict[str, float]:
    """Milliseconds per step by method."""
    out = folder / "predicted.json"
    script = [str(HERE / "predictions.py"), "--leg", str(hosts), "--out", str(out), "--compute-ms", str(compute_ms)]
    launch = [sys.executable, str(HERE / "launch.py"), "--hosts", str(hosts), "--rate", rate, "--", *script]
    subprocess.run(launch, check=True)
    return dict(json.loads(out.read_text()))


def measured(hosts: int, rate: str, compute_ms: float, rounds: int, folder: Path) -> dict[str, float]:
    """Milliseconds per step by method, medians over the rounds (means where a method has a period)."""
    out = folder / "measured.json"
    bench = [sys.executable, str(HERE / "bench.py"), "--hosts", str(hosts), "--rate", rate, "--rounds", str(rounds)]
    sizes = ["--warmup", str(2 * PERIOD), "--steps", str(2 * PERIOD), "--compute-ms", str(compute_ms)]
    subprocess.run([*bench, *sizes, "--methods", *METHODS, "--json", str(out)], check=True)
    rows = json.loads(out.read_text())["rows"]
    return {row["method"]: row["mean_ms" if "sync_every" in row["method"] else "median_ms"] for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute-ms", type=float, default=100)
    parser.add_argument("--leg", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.leg:
        leg(options)
        return 0
    lines = ["| hosts | rate | method | predicted ms | measured ms | off by |", "|---|---|---|---|---|---|"]
    for hosts in options.hosts:
        for rate in options.rate:
            with tempfile.TemporaryDirectory() as folder:
                forecast = predicted(hosts, rate, options.compute_ms, Path(folder))
                found = measured(hosts, rate, options.compute_ms, options.rounds, Path(folder))
            for name in METHODS:
                off = 100 * (forecast[name] / found[name] - 1)
                lines.append(
                    f"| {hosts} | {rate} | `{name}` | {forecast[name]:.0f} | {found[name]:.0f} | {off:+.0f} % |"
                )
    print("\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
