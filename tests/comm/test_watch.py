"""The watcher between real processes: every rank ends in time and says why; a stop comes after the same step."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_sync.comm.failure import RemoteFailure
from lightning_sync.comm.watch import Watcher
from tests.workers import launch_ranks, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")]


def watch(prefix="fit-0", **options):
    store = dist.distributed_c10d._get_default_store()
    return Watcher(store, dist.get_rank(), dist.get_world_size(), prefix=prefix, **options)


def all_reduce():
    dist.all_reduce(torch.ones(1))


# ---------------------------------------------------------------------- failures


def fail_in_lock_step(rank, world_size, culprit, how, options):
    """Train in lock-step; at step 3 one rank raises, or is killed, or raises and stays alive.

    Returns on the culprit; all others raise, or are ended by the watcher.
    """
    watcher = watch(**options)
    began = time.monotonic()
    try:
        for step in range(1, 1000):
            watcher.begin_step()
            if rank == culprit and step == 3:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("boom")
            try:
                all_reduce()
            except RuntimeError as error:
                raise watcher.explain(error, "all_reduce") from error
    except ValueError as error:
        watcher.report_failure(error, "training_step")
        if how == "stays":
            watcher.close()
            time.sleep(9)
            return "went on"
        raise
    finally:
        print(f"took {time.monotonic() - began:.1f} s", flush=True)
        watcher.close()


@pytest.mark.parametrize("culprit", [1, 0])
def test_an_exception_reaches_all_ranks(culprit):
    outcomes = launch_ranks(fail_in_lock_step, 3, culprit, "raises", {})
    for o in outcomes:
        assert o.exit_code == 1
        assert float(o.stderr.split("took ")[1].split()[0]) < 10
        if o.rank == culprit:
            assert o.error == "ValueError: boom"
        else:
            assert o.error.startswith(f"RemoteFailure: rank {culprit} (host ")
            assert "failed at step 3 in training_step: ValueError: boom" in o.error
            assert 'raise ValueError("boom")' in o.error  # the line of code, from the other rank's traceback


def test_ranks_blocked_in_a_collective_are_ended_while_the_failed_one_lives_on():
    outcomes = launch_ranks(fail_in_lock_step, 3, 1, "stays", {})
    assert [o.exit_code for o in outcomes] == [70, 0, 70]
    assert outcomes[1].result == "went on"  # its own close() spared it
    for o in (outcomes[0], outcomes[2]):
        assert o.seconds < outcomes[1].seconds  # ended before rank 1, which sleeps for 9 s
        assert "failed at step 3 in training_step: ValueError: boom" in o.stderr
        assert "Stacks of all threads" in o.stderr
        assert "in all_reduce" in o.stderr


@pytest.mark.parametrize(
    ("culprit", "text"), [(1, "no sign of life"), (0, "rank 0's host, which keeps the store, is gone")]
)
def test_a_killed_rank_is_named_by_every_survivor(culprit, text):
    outcomes = launch_ranks(fail_in_lock_step, 3, culprit, "killed", {})
    assert outcomes.pop(culprit).exit_code == -signal.SIGKILL
    for o in outcomes:
        assert o.error.startswith(f"RemoteFailure: rank {culprit} (host ")
        assert text in o.error
        assert float(o.stderr.split("took ")[1].split()[0]) < 10


def fail_beside_the_main_thread(rank, world_size):
    """Rank 1 fails on a side thread: once while its main thread works, once while it is blocked."""
    options = {"grace": 1.0, "interval": 0.1}
    watcher = watch("works", **options)
    if rank == 1:
        side = threading.Thread(target=lambda: watcher.report_failure(ValueError("boom"), "reduction"))
        side.start()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            time.sleep(0.001)  # moves
            sum(range(100_000))
        watcher.close()
        watcher = watch("blocked", **options)
        watcher.report_failure(ValueError("boom"), "reduction")
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    watcher.close()
    watcher = watch("blocked", **options)
    while True:
        time.sleep(0.05)
        watcher.check()


def test_a_rank_whose_main_thread_is_blocked_after_its_own_failure_is_ended_too():
    outcomes = launch_ranks(fail_beside_the_main_thread, 2)
    assert outcomes[1].exit_code == 70
    assert "failed at step 0 in reduction: ValueError: boom" in outcomes[1].stderr
    assert outcomes[0].exit_code == 1
    assert "rank 1" in outcomes[0].error


def two_runs(rank, world_size):
    first = watch("fit-0", grace=1.0, interval=0.1)
    if rank == 1:
        first.report_failure(ValueError("boom"), "training_step")
    seen = None
    try:
        while rank == 0:
            first.check()
            time.sleep(0.01)
    except RemoteFailure as failure:
        seen = failure.message
    first.close()
    second = watch("fit-1", grace=1.0, interval=0.1)
    time.sleep(3)  # longer than any grace: the first run's end must not catch up
    for _ in range(5):
        assert not second.begin_step()
        all_reduce()
    second.finish()
    second.close()
    return seen, second.failure, second.steps


def test_a_process_that_catches_a_failure_runs_again():
    assert run_ranks(two_runs, 2) == [("boom", None, 5), (None, None, 5)]


def lose_the_store(rank, world_size, sign):
    watcher = watch(interval=0.1, grace=3.0, store_timeout=1.5)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    time.sleep(0.5)
    if rank == 1:
        os.kill(int(pids[0]), sign)
    try:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            watcher.check()
            time.sleep(0.02)
    except RemoteFailure as failure:
        if rank == 1:
            time.sleep(1)  # so that rank 2 sees what it is to see
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pids[0]), signal.SIGKILL)
        began = time.monotonic()
        watcher.close()
        assert time.monotonic() - began < 4
        return failure.rank, failure.message
    raise AssertionError("the loss of the store was not noticed")


@pytest.mark.parametrize(("sign", "text"), [(signal.SIGKILL, "is gone: "), (signal.SIGSTOP, "no answer for 1.5 s")])
def test_the_loss_of_the_stores_host_is_a_failure(sign, text):
    outcomes = launch_ranks(lose_the_store, 3, sign)
    assert outcomes[0].exit_code == -signal.SIGKILL
    for o in outcomes[1:]:
        assert o.exit_code == 0, o.stderr
        rank, message = o.result
        assert rank == 0
        assert "rank 0's host, which keeps the store, is gone" in message
        assert text in message


# ---------------------------------------------------------------------- stops


def stop_in_lock_step(rank, world_size, seeds, total):
    """Train once per seed with random pauses; random ranks ask for a stop at random steps."""
    ends = []
    for seed in seeds:
        dice, own = random.Random(seed), random.Random(1000 * seed + rank)
        asking = {who: dice.randrange(total) for who in dice.sample(range(world_size), dice.randint(1, world_size))}
        watcher = watch(f"fit-{seed}", interval=0.03)
        for step in range(total):
            if asking.get(rank) == step:
                watcher.request_stop()
            if watcher.begin_step():
                break
            time.sleep(own.random() * 0.01)
            all_reduce()
        watcher.finish()
        ends.append(watcher.steps)
        watcher.close()
    return ends


def test_all_ranks_stop_after_the_same_step():
    """Requests by one or several ranks, from before the first step to the last, where some ranks finish unstopped."""
    ends = run_ranks(stop_in_lock_step, 4, range(25), 40, deadline=90)
    assert ends[0] == ends[1] == ends[2] == ends[3]
    assert len(set(ends[0])) > 5  # at many different steps


def stop_at_the_edges(rank, world_size):
    """Before the first step with a rank that starts late; and after another rank has finished and closed."""
    if rank == 1:
        time.sleep(1)
    early = watch("early", interval=0.1)
    early.request_stop("SIGTERM")
    while early.stop_at is None:
        time.sleep(0.01)
    begun = early.begin_step()
    early.close()

    late = watch("late", interval=0.1)
    for _ in range(3 if rank == 1 else 1000):
        if late.begin_step():
            break
        if rank != 1 and late.steps == 5:
            late.request_stop()
        time.sleep(0.1)
    late.finish()
    if rank == 1:
        late.close()
        time.sleep(2)
    late.close()
    return begun, early.steps, late.steps


def test_stops_at_the_very_start_and_beside_a_finished_rank():
    results = run_ranks(stop_at_the_edges, 3)
    assert [(begun, early) for begun, early, _ in results] == [(True, 0)] * 3
    assert results[1][2] == 3
    assert results[0][2] == results[2][2] < 20


def train_until_sigterm(rank, world_size):
    watcher = watch()
    signal.signal(signal.SIGTERM, lambda number, frame: watcher.request_stop("SIGTERM"))
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    while not watcher.begin_step():
        all_reduce()
    taken = time.monotonic() - began
    watcher.close()
    return watcher.steps, watcher.stop_reason.split(" (")[0], taken < 5


def test_sigterm_on_one_rank_stops_all():
    results = run_ranks(train_until_sigterm, 3)
    assert len(set(results)) == 1
    steps, reason, in_time = results[0]
    assert steps > 0
    assert reason == "SIGTERM on rank 1"
    assert in_time


# ---------------------------------------------------------------------- the ordinary end


def end_at_different_times(rank, world_size):
    watcher = watch(interval=0.1)
    time.sleep(0.5 * rank)
    watcher.finish()
    began = time.monotonic()
    watcher.close()
    return watcher.failure, time.monotonic() - began


def test_rank_0_keeps_the_store_until_the_others_have_finished():
    results = run_ranks(end_at_different_times, 3)
    assert [failure for failure, _ in results] == [None] * 3
    assert 0.5 < results[0][1] < 5
    assert results[2][1] < 1
