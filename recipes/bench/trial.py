"""One trial: in every rank a forked process trains a few steps with one method and measures them.

Every trial starts from the same image (everything imported, nothing used), with its own process groups, the same
warm-up and the same seeds. All ranks step through the same list of trials; if a rank fails or hangs in one of them, all
leave it and go on with the next.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import torch._dynamo  # DDP imports it on first use; here it is part of the image that all trials start from
from hosts import InterfaceCounters
from launch import die_with_parent
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from meeting import Meeting, called_off
from methods import Method

from models import MODELS, loader

COUNTED = ("wire_bytes", "network_bytes", "messages")


@dataclass(frozen=True)
class Job:
    """What every trial of a run has in common.

    Attributes:
        model: `emu` or `lm`.
        width: Hidden size of the model.
        layers: Blocks of the model.
        compute_ms: Milliseconds that `emu` sleeps per step.
        warmup: Steps before the measured ones.
        steps: Measured steps.
        deadline: Seconds one trial may take, set-up included.
    """

    model: str
    width: int
    layers: int
    compute_ms: float
    warmup: int
    steps: int
    deadline: float


@dataclass(frozen=True)
class Place:
    """Where this process stands, from the variables that the launcher set."""

    rank: int
    local_rank: int
    host: int
    world_size: int
    ranks_per_host: int
    interface: str

    @classmethod
    def read(cls) -> Place:
        """Read the launcher's variables."""
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            host=int(os.environ["GROUP_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            ranks_per_host=int(os.environ["LOCAL_WORLD_SIZE"]),
            interface=os.environ["GLOO_SOCKET_IFNAME"],
        )


class Window(Callback):
    """Measures the steps after the warm-up, from the end of one step to the end of the next.

    All ranks meet right before the first and right after the last measured step, without using the network. The
    interface is read after these meetings, so that its difference holds all that belongs to the measured steps.
    """

    def __init__(self, meeting: Meeting, interface: str, warmup: int, steps: int, timeout: float) -> None:
        self.meeting = meeting
        self.interface = interface
        self.warmup = warmup
        self.steps = steps
        self.timeout = timeout
        self.measured: dict[str, Any] = {}
        self._done = 0
        self._times: list[float] = []
        self._interface_before = InterfaceCounters(0, 0, 0, 0)
        self._counted_before: dict[str, int] = {}
        self._cpu_before = (0.0, 0.0)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        now = time.perf_counter()
        self._done += 1
        if self._done == self.warmup:
            self._open(trainer)
        elif self._done > self.warmup:
            self._times.append(now)
            if self._done == self.warmup + self.steps:
                self._close(trainer)

    def _open(self, trainer: Trainer) -> None:
        self._counted_before = read_counted(trainer.strategy)
        self.meeting.wait("before", self.timeout)
        self._interface_before = InterfaceCounters.read(self.interface)
        self._cpu_before = (own_cpu_seconds(), machine_cpu_seconds())
        self.meeting.wait("start", self.timeout)  # everybody has read before anybody sends
        self._times = [time.perf_counter()]

    def _close(self, trainer: Trainer) -> None:
        counted = read_counted(trainer.strategy)
        own_cpu = own_cpu_seconds() - self._cpu_before[0]
        self.meeting.wait("after", self.timeout)
        machine_cpu = machine_cpu_seconds() - self._cpu_before[1]
        interface = InterfaceCounters.read(self.interface) - self._interface_before
        self.meeting.wait("end", self.timeout)
        each = [1000 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]
        self.measured = {
            "median_ms": statistics.median(each),
            "mean_ms": statistics.fmean(each),
            "steps": self.steps,
            "own_cpu_s": own_cpu,
            "machine_cpu_s": machine_cpu,
            "interface": asdict(interface),
            "counted": {name: counted[name] - self._counted_before[name] for name in counted},
            "predicted": read_predicted(trainer.strategy),
        }


def own_cpu_seconds() -> float:
    """CPU time that this process has used, all its threads together."""
    return time.process_time()


def machine_cpu_seconds() -> float:
    """CPU time that all processes and the kernel of this machine have used, all cores together."""
    user, nice, system, _idle, _wait, irq, soft_irq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def read_counted(strategy: object) -> dict[str, int]:
    """The counters a strategy of ours keeps, as far as it has them; empty for others."""
    counters = getattr(strategy, "counters", None)
    return {name: int(getattr(counters, name)) for name in COUNTED if hasattr(counters, name)}


def read_predicted(strategy: object) -> dict[str, float]:
    """Bytes per rank and step that a strategy of ours predicts; empty for others."""
    if not hasattr(strategy, "predicted_bytes"):
        return {}
    predicted = strategy.predicted_bytes()
    return {} if predicted is None else {"sent": float(predicted.sent), "network": float(predicted.network)}


def make_trainer(method: Method, place: Place, steps: int, *callbacks: Callback) -> Trainer:
    """A Trainer with all extras off, for `steps` steps of a method."""
    hosts = place.world_size // place.ranks_per_host
    return Trainer(
        accelerator="cpu",
        strategy=method.make(),
        devices=1 if method.alone else place.ranks_per_host,
        num_nodes=1 if method.alone else hosts,
        max_steps=steps,
        max_epochs=1,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def make_module(job: Job) -> LightningModule:
    """The job's model, the same on every rank and in every trial."""
    torch.manual_seed(0)
    return MODELS[job.model](job.width, job.layers, job.compute_ms)


def quiet() -> None:
    """Silence what Lightning and torch say about runs that are set up as these must be; errors stay."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"(lightning|torch)\.")
    for name in ("lightning.pytorch", "lightning.fabric", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def measure(method: Method, job: Job, place: Place, meeting: Meeting) -> dict[str, Any]:
    """Train with a method and return what the window measured.

    Raises:
        RuntimeError: Training ended before the window did.
    """
    warmup, steps = (method.period * -(-count // method.period) for count in (job.warmup, job.steps))
    window = Window(meeting, place.interface, warmup, steps, job.deadline)
    # One period more than is measured: a run ends with an exchange that its period does not ask for.
    total = warmup + steps + (method.period if method.period > 1 else 0)
    trainer = make_trainer(method, place, total, window)
    trainer.fit(make_module(job), loader(total, seed=1000 + place.rank))
    if not window.measured:
        raise RuntimeError(f"training ended before step {warmup + steps}")
    return {"method": method.name, "place": asdict(place), **window.measured}


def run_trials(trials: list[Method], job: Job, folder: Path) -> None:
    """Run trials one after the other in this rank; the other ranks do the same with the same list.

    A method that failed once is not tried again. Results go to `folder`, see `read_trial`.

    Args:
        trials: The method of each trial, in order.
        job: What all have in common.
        folder: A folder shared by all ranks of this run, empty at first.
    """
    quiet()
    place = Place.read()
    outside = Meeting(folder / "between", place.rank, place.world_size)
    failed: set[str] = set()
    for number, method in enumerate(trials):
        if method.name in failed:
            continue
        meeting = Meeting(folder / f"trial{number}", place.rank, place.world_size)
        _run_in_child(method, job, place, meeting, number)
        outside.wait(f"trial{number}", 2 * job.deadline)
        if meeting.called_off() is not None:
            failed.add(method.name)


def _run_in_child(method: Method, job: Job, place: Place, meeting: Meeting, number: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os._exit(_child(method, job, place, meeting, number))
    end = time.monotonic() + job.deadline
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status != 0 and meeting.called_off() is None:
                meeting.call_off(f"the process ended with status {os.waitstatus_to_exitcode(status)}")
            return
        late = time.monotonic() > end
        if late and meeting.called_off() is None:
            meeting.call_off(f"the deadline of {job.deadline:g} s passed")
        if meeting.called_off() is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.02)


def _child(method: Method, job: Job, place: Place, meeting: Meeting, number: int) -> int:
    die_with_parent()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + number)  # the last trial's may linger
    try:
        measured = measure(method, job, place, meeting)
        draft = meeting.folder / f"draft.{place.rank}"
        draft.write_text(json.dumps(measured))
        draft.replace(meeting.folder / f"measured.{place.rank}")
    except BaseException as error:  # the boundary of a process: whatever it is, it is reported and ends this trial only
        meeting.call_off(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def read_trial(folder: Path, number: int) -> tuple[list[dict[str, Any]], str | None]:
    """What a trial measured, by rank, and why it failed, if it did.

    Returns:
        The ranks' measurements, empty if it failed or was left out, and the reason, None if it did not fail.
    """
    trial = folder / f"trial{number}"
    files = sorted(trial.glob("measured.*"), key=lambda file: int(file.suffix[1:]))
    reason = called_off(trial)
    if reason is not None:
        return [], reason
    return [json.loads(file.read_text()) for file in files], None


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    return {"torch": torch.__version__, "lightning": lightning.__version__, "python": sys.version.split()[0]}
