#!/usr/bin/env python3
"""Three ways to synchronise four processes over a slow link; then one process is killed, and the run goes on exactly.

    ./recipes/demo.sh            # makes .venv first
    python recipes/demo/race.py --mbit 20

The link is throttled in software (see `rank.py`), which needs no root; `recipes/bench/` emulates links in the kernel.
The runs take their turn, so that none of them takes processor time from another, and each has its own clock, which
starts at its first step. The model is a byte-level transformer on the Python library's sources.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

RANKS = 4
EPOCH = 50  # steps; a checkpoint is saved at the end of each
VICTIM = 2
_HERE = Path(__file__).parent
_COMMON = (
    *("model.width=96", "model.depth=3", "model.context=64", "data.length=64", "data.batch_size=4"),
    *(
        "data.val_sequences=64",
        f"trainer.devices={RANKS}",
        "trainer.accelerator=cpu",
        "trainer.enable_progress_bar=false",
    ),
    *(f"trainer.limit_train_batches={EPOCH}", "callbacks.monitor.every_n_steps=2", "logger=none"),
    "+callbacks.checkpoint.save_on_train_epoch_end=true",
    *("+callbacks.order._target_=order.EpochByStep", f"+callbacks.order.steps={EPOCH}"),
)
_DILOCO = ("strategy=diloco", "strategy.warmup_steps=10", "strategy.sync_every=10", "strategy.overlap_steps=4")
LANES = {
    "DDP's reducer, bf16 on the wire": ("bf16", ("strategy=strict", "compressor=bf16")),
    "strict, PowerSGD of rank 2": (
        "powersgd",
        ("strategy=strict", "compressor=powersgd", "compressor.rank=2", "compressor.warmup_steps=5"),
    ),
    "DiLoCo, 10 steps, int8, overlapped": ("diloco", (*_DILOCO, "compressor=int8")),
}


@dataclass
class Lane:
    """One run, as the table shows it."""

    title: str
    folder: Path
    overrides: tuple[str, ...]
    state: str = "waits"
    step: int = 0
    seconds: float = 0.0
    loss: float | None = None
    sent: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.folder.parent / f"{self.folder.name}.log"

    def look(self) -> None:
        """Read how far it is from what its rank 0 has written."""
        path = self.folder / "telemetry" / "rank-0.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in reversed(lines):
            try:
                record = json.loads(line)
            except ValueError:  # half written
                continue
            if record["kind"] == "step":
                self.step, self.seconds = record["step"], record["seconds"]
                self.loss, self.sent = record["loss"], record.get("sent_bytes", 0)
                return


class Race:
    """Starts the runs one after the other and keeps the table current.

    Args:
        mbit: Rate of every rank's link.
        steps: Steps of every run.
        output: Where the runs lie.
        live: The table on the screen.
    """

    def __init__(self, mbit: float, steps: int, output: Path, live: Live) -> None:
        self.mbit, self.steps, self.output, self.live = mbit, steps, output, live
        self.lanes: list[Lane] = []
        self.pids = Path(tempfile.mkdtemp(prefix="lsync-demo-"))

    def add(self, title: str, name: str, overrides: tuple[str, ...]) -> Lane:
        """A run that will start later."""
        lane = Lane(title, self.output / name, overrides)
        self.lanes.append(lane)
        return lane

    def run(self, lane: Lane, *more: str, until: Callable[[Lane], bool] = lambda lane: False) -> int | None:
        """Run it to its end: its exit code, or `None` if it was left running because `until` came true."""
        if lane.process is None:
            words = (*_COMMON, *lane.overrides, f"trainer.max_steps={self.steps}", f"run_dir={lane.folder}", *more)
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "LIGHTNING_SYNC_DEMO_MBIT": str(self.mbit),
                "LIGHTNING_SYNC_DEMO_PIDS": str(self.pids),
            }
            with lane.log.open("ab") as log:
                command = [sys.executable, str(_HERE / "rank.py"), *words]
                lane.process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            lane.state = "starts"
        while (code := lane.process.poll()) is None:
            time.sleep(0.25)
            before = lane.step
            lane.look()
            if lane.step != before:
                lane.state = "trains"
            self.show()
            if until(lane):
                return None
        lane.look()
        lane.process = None
        self.show()
        return code

    def show(self) -> None:
        """Draw the table."""
        table = Table(title=f"{RANKS} processes, link throttled in software to {self.mbit:g} Mbit/s per process")
        for name in ("run", "", "steps", "seconds", "loss", "MB sent", "state"):
            table.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=name != "run")
        for lane in self.lanes:
            bar = ProgressBar(total=self.steps, completed=lane.step, width=16)
            loss = "" if lane.loss is None else f"{lane.loss:.3f}"
            done = (str(lane.step), f"{lane.seconds:.1f}", loss, f"{lane.sent / 1e6:.1f}")
            table.add_row(lane.title, bar, *(done if lane.step else ("",) * 4), lane.state)
        self.live.update(table, refresh=True)

    def kill(self, rank: int) -> None:
        """End one rank as a failing machine would: it gets no chance to say anything."""
        os.kill(int((self.pids / str(rank)).read_text()), signal.SIGKILL)

    def stop(self) -> None:
        """End what still runs, with all processes that it started."""
        for lane in self.lanes:
            if lane.process is not None and lane.process.poll() is None:
                os.killpg(lane.process.pid, signal.SIGKILL)
                lane.process.wait()


def same_bits(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same parameters and buffers, bit for bit."""
    first, second = (torch.load(p, map_location="cpu", weights_only=True)["state_dict"] for p in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def what_was_said(log: Path) -> str:
    """The line in which the survivors name the rank that was killed."""
    named = [line.strip() for line in log.read_text(errors="replace").splitlines() if f"ank {VICTIM} " in line]
    return named[-1] if named else f"nothing; see {log}"


def race(course: Race, console: Console) -> int:
    """All of it; the exit code."""
    for title, (name, overrides) in LANES.items():
        course.add(title, name, overrides)
    again = course.add("DiLoCo again, one process killed", "diloco-killed", course.lanes[-1].overrides)
    whole = course.lanes[-2]
    for lane in course.lanes[:-1]:
        if course.run(lane):
            lane.state = "failed"
            course.show()
            console.print(f"{lane.title} failed; see {lane.log}")
            return 1
        lane.state = "done"
    kill_at = course.steps - EPOCH // 2
    if course.run(again, until=lambda lane: lane.step >= kill_at) is not None:
        console.print(f"{again.title} ended before step {kill_at}; see {again.log}")
        return 1
    course.kill(VICTIM)
    killed = time.perf_counter()
    again.state = f"rank {VICTIM} killed"
    course.run(again)
    console.print(f"kill -9 of rank {VICTIM}; all others ended {time.perf_counter() - killed:.1f} s later and said:")
    console.print(f"  {what_was_said(again.log)}", style="bold", highlight=False)
    checkpoint = again.folder / "checkpoints" / "last.ckpt"
    again.state = "resumes"
    if course.run(again, f"ckpt_path={checkpoint}"):
        console.print(f"the resumed run failed; see {again.log}")
        return 1
    same = same_bits(checkpoint, whole.folder / "checkpoints" / "last.ckpt")
    again.state = "done"
    course.show()
    verdict = "the same bits as" if same else "NOT the bits of"
    console.print(f"Resumed from the end of the last epoch before, it ended with {verdict} the run nobody killed.")
    folders = [str(lane.folder) for lane in course.lanes]
    report = [sys.executable, "-m", "lightning_sync.cli", "report", *folders, "-o", str(course.output / "report")]
    done = subprocess.run(report, stdout=subprocess.DEVNULL, check=False)
    console.print(f"Report: {course.output / 'report' / 'index.html'}", highlight=False)
    return int(not same) or done.returncode


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(
        description="A race over a slow link, a killed process, an exact resume, a report."
    )
    parser.add_argument("--mbit", type=float, default=40, help="rate of every process's link (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3 * EPOCH, help="steps of every run (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="a new directory for the runs (default: runs/demo-DATE_TIME)")
    chosen = parser.parse_args(arguments)
    if chosen.mbit <= 0:
        parser.error(f"--mbit={chosen.mbit:g} is not accepted: more than 0.")
    if chosen.steps < 2 * EPOCH or chosen.steps % EPOCH:
        parser.error(f"--steps={chosen.steps} is not accepted: a multiple of {EPOCH} from {2 * EPOCH}.")
    output = chosen.output or Path("runs") / time.strftime("demo-%Y-%m-%d_%H-%M-%S")
    if output.exists():
        parser.error(f"--output={output} exists already; give a new directory.")
    output.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` below ends the ranks
    console = Console()
    began = time.perf_counter()
    with Live(console=console, auto_refresh=False) as live:
        course = Race(chosen.mbit, chosen.steps, output.resolve(), live)
        try:
            code = race(course, console)
        finally:
            course.stop()
    console.print(f"\n{time.perf_counter() - began:.0f} s in all.")
    return code


if __name__ == "__main__":
    sys.exit(main())
