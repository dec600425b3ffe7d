"""Interrupts training jobs on a test cluster, again and again, and checks that nothing is lost:

    sudo python -m tests.slurm.requeue --runs 20                # signals at random steps, in strict, diloco and async
    sudo python -m tests.slurm.requeue --runs 5 --how preempt   # another job takes the nodes away
    sudo python -m tests.slurm.requeue --runs 5 --how limit     # the time limit is near
    sudo python -m tests.slurm.requeue --runs 3 --how power     # a node loses power

One job is interrupted many times; each time counts: the ranks saved at one step, SLURM has the job in its queue again,
and it went on from there. At the end its weights must be those of a job that nobody interrupted, bit for bit, in modes
that are deterministic. After a loss of power the job goes on from the newest periodic checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_sync.strategies import NAMES
from recipes.bench.hosts import ending_on_sigterm
from tests.slurm.cluster import Cluster
from tests.slurm.tiny import last_step, starts

MODES = ("strict", "diloco", "async")
OPTIONS = {
    "diloco": ("strategy.warmup_steps=5", "strategy.sync_every=7", "strategy.replica=rank"),
}
DETERMINISTIC = ("strict", "diloco")
ROOT = Path(__file__).parents[2]
_SOON = 240.0  # seconds for a job to start, or to come back, on a busy machine


@dataclass
class Interrupted:
    """A job and what became of it.

    Attributes:
        mode: The strategy.
        saved: Steps at which it was saved, one for each interruption.
        problems: What went wrong, empty if nothing did.
        seconds: From each interruption to the job in the queue again, and to the first step after it.
    """

    mode: str
    saved: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)


class TrainingJob:
    """A job that trains the tiny model.

    Args:
        cluster: Where it runs.
        folder: Its working directory.
        mode: The strategy.
        steps: When it is done.
        tasks: Tasks per node, on two nodes.
        minutes: Its time limit.
        signal: ``--signal``.
        every: Steps between two periodic checkpoints.
        sleep: Seconds added to each step.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        mode: str,
        steps: int,
        *,
        tasks: int = 2,
        minutes: int = 30,
        signal: str | None = None,
        every: int = 1_000_000,
        sleep: float = 0.0,
        extra: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True)
        self.cluster, self.folder, self.trace = cluster, folder, folder / "trace"
        self.log = folder / "log.txt"
        overrides = [
            f"strategy={mode}",
            *OPTIONS.get(mode, ()),
            "model=tiny",
            "data=stateful",
            "logger=none",
            f"run_dir={folder}/run",
            f"trainer.max_steps={steps}",
            "trainer.enable_progress_bar=false",
            f"+callbacks.checkpoint.every_n_train_steps={every}",
            "+callbacks.trace._target_=tests.slurm.tiny.Trace",
            f"+callbacks.trace.folder={self.trace}",
            f"+callbacks.trace.sleep={sleep}",
            *extra,
        ]
        script = folder / "job.sbatch"
        command = " ".join([sys.executable, "-m", "lightning_sync.train", "--config-dir", f"{ROOT}/tests/slurm/conf"])
        script.write_text(
            "\n".join(
                [
                    "#!/bin/bash",
                    f"#SBATCH --job-name={mode}",
                    f"#SBATCH --nodes=2 --ntasks-per-node={tasks}",
                    f"#SBATCH --requeue --open-mode=append --output={self.log}",
                    f"#SBATCH --time={minutes}",
                    *([f"#SBATCH --signal={signal}"] if signal else []),
                    f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore",
                    f"srun --kill-on-bad-exit=1 {command} {' '.join(overrides)}",
                    "",
                ]
            )
        )
        self.job = cluster.sbatch([str(script)], cwd=folder)

    def restarts(self) -> int:
        """How often SLURM has put it back into the queue."""
        return int(self.cluster.show(self.job).get("Restarts", 0))

    def trained(self, start: int, deadline: float) -> int:
        """Wait until the start of that number has begun training, and return its first step."""
        until = time.monotonic() + deadline
        while len(starts(self.trace)) <= start:
            self.cluster.release(self.job)
            self.must_live()
            if time.monotonic() > until:
                raise AssertionError(f"start {start} has not begun within {deadline:g} s\n{self.tail()}")
            time.sleep(0.2)
        return starts(self.trace)[start][1]

    def reached(self, step: int, deadline: float) -> None:
        """Wait until a step is finished."""
        until = time.monotonic() + deadline
        while last_step(self.trace) < step:
            self.must_live()
            if time.monotonic() > until:
                raise AssertionError(f"step {step} not reached within {deadline:g} s\n{self.tail()}")
            time.sleep(0.01)

    def requeued(self, restarts: int, deadline: float) -> None:
        """Wait until SLURM has counted that many restarts."""
        until = time.monotonic() + deadline
        while self.restarts() < restarts:
            self.must_live()
            if time.monotonic() > until:
                raise AssertionError(f"not requeued within {deadline:g} s\n{self.tail()}")
            time.sleep(0.2)

    def must_live(self) -> None:
        """Raise if it has ended for good."""
        if (state := self.cluster.states(self.job)[0]) in ("FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"):
            raise AssertionError(f"the job is {state}\n{self.tail()}")

    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that a stop has left."""
        found = (self.folder / "run" / "checkpoints").glob("stopped-step=*.ckpt")
        return sorted(int(re.findall(r"=(\d+)", path.name)[0]) for path in found)

    def weights(self) -> dict[str, torch.Tensor]:
        """What it has learned, once it is done."""
        path = self.folder / "run" / "checkpoints" / "last.ckpt"
        state: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        return state

    def tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else "(no output)"


def interrupt(job: TrainingJob, mode: str, times: int, how: str, draw: random.Random) -> Interrupted:
    """Interrupt a job that many times, and let it finish."""
    result = Interrupted(mode)
    try:
        for count in range(times):
            first = job.trained(count, _SOON)
            if count and first != result.saved[-1]:
                raise AssertionError(f"saved at step {result.saved[-1]}, resumed at {first}\n{job.tail()}")
            job.reached(first + draw.randint(1, 40), _SOON)
            begun = time.monotonic()
            if how == "signal":
                job.cluster.run("scancel", "--signal=USR1", job.job)
            elif how == "preempt":
                preempt(job)
            known = set(result.saved)
            job.requeued(count + 1, _SOON)
            queued = time.monotonic() - begun
            new = [step for step in job.checkpoints() if step not in known and step > first]
            if len(new) != 1:
                raise AssertionError(f"{len(new)} new checkpoints: {new}\n{job.tail()}")
            result.saved.append(new[0])
            job.trained(count + 1, _SOON)
            result.seconds.append((queued, time.monotonic() - begun))
            print(f"{how} {mode} {count + 1}: saved and resumed at step {new[0]}", file=sys.stderr, flush=True)
        last = starts(job.trace)[times][1]
        if last != result.saved[-1]:
            raise AssertionError(f"saved at step {result.saved[-1]}, resumed at {last}\n{job.tail()}")
        if how == "limit":  # each start has the same short time again
            job.cluster.run("scancel", job.job)
        elif (state := job.cluster.wait(job.job, deadline=600)) != "COMPLETED":
            raise AssertionError(f"ended as {state}\n{job.tail()}")
    except AssertionError as error:
        result.problems.append(str(error))
        job.cluster.try_run("scancel", job.job)
    return result


def preempt(job: TrainingJob) -> None:
    """Submit a job that takes both nodes away for a second."""
    script = job.folder / "urgent.sbatch"
    script.write_text("#!/bin/bash\nsleep 1\n")
    job.cluster.sbatch(
        ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", str(script)], cwd=job.folder
    )


def lose_power(job: TrainingJob, times: int, every: int, draw: random.Random) -> Interrupted:
    """Power a node off and on again, that many times."""
    result = Interrupted("power")
    try:
        for count in range(times):
            first = job.trained(count, _SOON)
            job.reached(first + every + draw.randint(3, every), _SOON)
            begun = time.monotonic()
            node = draw.randint(1, 2)
            job.cluster.power_off(node)
            job.requeued(count + 1, _SOON)
            queued = time.monotonic() - begun
            job.cluster.power_on(node)
            resumed = job.trained(count + 1, _SOON)
            result.seconds.append((queued, time.monotonic() - begun))
            result.saved.append(resumed)
            if resumed < first + every or resumed % every:
                raise AssertionError(f"resumed at step {resumed}, after {first}, saving every {every}\n{job.tail()}")
        if (state := job.cluster.wait(job.job, deadline=600)) != "COMPLETED":
            raise AssertionError(f"ended as {state}\n{job.tail()}")
    except AssertionError as error:
        result.problems.append(str(error))
        job.cluster.try_run("scancel", job.job)
    return result


def same(ours: TrainingJob, theirs: TrainingJob) -> bool:
    """Whether two jobs ended with the same bits."""
    a, b = ours.weights(), theirs.weights()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def campaign(
    cluster: Cluster, folder: Path, runs: int, how: str, modes: Sequence[str], *, steps: int, tasks: int, seed: int
) -> list[Interrupted]:
    """Interrupt `runs` times in all, one job for each mode, and compare with undisturbed jobs."""
    draw, results = random.Random(seed), []
    for index, mode in enumerate(modes):
        times = runs // len(modes) + (index < runs % len(modes))
        if not times:
            continue
        if how == "power":
            job = TrainingJob(cluster, folder / "power", mode, steps, tasks=tasks, every=50)
            result = lose_power(job, times, 50, draw)
        elif how == "limit":
            # SLURM sends the signal up to a minute early.
            job = TrainingJob(
                cluster, folder / f"limit-{mode}", mode, 10**6, tasks=tasks, minutes=3, signal="USR1@30", sleep=0.02
            )
            result = interrupt(job, mode, times, how, draw)
        else:
            signal = "USR1@20" if how == "preempt" else None
            job = TrainingJob(cluster, folder / f"{how}-{mode}", mode, steps, tasks=tasks, signal=signal)
            result = interrupt(job, mode, times, how, draw)
        if how != "limit" and not result.problems and mode in DETERMINISTIC:
            undisturbed = TrainingJob(cluster, folder / f"{how}-{mode}-undisturbed", mode, steps, tasks=tasks)
            state = cluster.wait(undisturbed.job, deadline=600)
            if state != "COMPLETED":
                result.problems.append(f"the undisturbed job ended as {state}\n{undisturbed.tail()}")
            elif not same(job, undisturbed):
                result.problems.append("its weights are not those of the undisturbed job")
        results.append(result)
        counted = ", ".join(f"{q:.1f}/{t:.0f}" for q, t in result.seconds)
        print(
            f"{how} {mode}: {len(result.seconds)} of {times} saved, requeued and resumed, at steps {result.saved}; "
            f"seconds to the queue/to the next step: {counted}; {'; '.join(result.problems) or 'no problems'}",
            flush=True,
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="interruptions in all")
    parser.add_argument("--how", default="signal", choices=("signal", "preempt", "limit", "power"))
    parser.add_argument("--modes", nargs="+", default=[m for m in MODES if m in NAMES], choices=MODES)
    parser.add_argument("--steps", type=int, default=1500, help="of each job")
    parser.add_argument("--tasks", type=int, default=2, help="per node")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="requeue-") as folder, Cluster() as cluster:
        os.chmod(folder, 0o755)
        results = campaign(
            cluster,
            Path(folder),
            options.runs,
            options.how,
            options.modes,
            steps=options.steps,
            tasks=options.tasks,
            seed=options.seed,
        )
    done = sum(len(r.seconds) for r in results)
    print(f"{done} of {options.runs} interruptions by {options.how} were saved, requeued and resumed")
    return 0 if done == options.runs and not any(r.problems for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
