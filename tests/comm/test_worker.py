"""The communication thread: one order, the first error kept, and no wait that a failure cannot end."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sync.comm.worker import Executor, ThreadExecutor, executor_for
from tests.workers import run_ranks


class FakeWork:
    """A collective that ends when the test says so; like gloo's, it cannot be cancelled, but waited for in slices."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.ended.set()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error


@pytest.fixture
def reports() -> list[tuple[BaseException, str]]:
    return []


@pytest.fixture
def executor(reports: list[tuple[BaseException, str]]) -> Iterator[ThreadExecutor]:
    made = ThreadExecutor(deadline=20, on_error=lambda error, where: reports.append((error, where)))
    yield made
    made.close()


def submit(executor: Executor, job: Callable[[], None], where: str = "here") -> Any:
    promise = executor.promise(torch.ones(1))
    executor.submit(job, [promise], where)
    return promise.future


def fail() -> None:
    raise ZeroDivisionError("boom")


def test_jobs_run_one_after_the_other_in_order_of_submission(executor: ThreadExecutor) -> None:
    seen: list[int] = []
    threads: set[str] = set()

    def job(number: int) -> None:
        time.sleep(0.02 if number == 0 else 0)
        seen.append(number)
        threads.add(threading.current_thread().name)

    futures = [submit(executor, lambda i=i: job(i)) for i in range(20)]
    for future in futures:
        assert torch.equal(future.wait(), torch.ones(1))
    assert seen == list(range(20))
    assert threads == {"lightning_sync-comm"}
    executor.check()


def test_the_first_error_is_kept_and_every_future_completes(executor: ThreadExecutor, reports: list[Any]) -> None:
    ran: list[int] = []
    futures = [
        submit(executor, lambda: ran.append(0)),
        submit(executor, fail, "bucket 1 at step 7"),
        submit(executor, lambda: ran.append(2)),
        submit(executor, lambda: (_ for _ in ()).throw(KeyError("later"))),
    ]
    for future in futures:
        future.wait()
    assert ran == [0], "after a failure nothing is reduced any more"
    with pytest.raises(ZeroDivisionError, match="boom"):
        executor.check()
    assert [(type(e), where) for e, where in reports] == [(ZeroDivisionError, "bucket 1 at step 7")]
    submit(executor, fail).wait()


def test_abort_ends_a_blocked_wait_at_once(executor: ThreadExecutor, reports: list[Any]) -> None:
    work, waiting = FakeWork(), threading.Event()

    def job() -> None:
        waiting.set()
        executor.wait(work)  # type: ignore[arg-type]

    future = submit(executor, job)
    assert waiting.wait(5)
    time.sleep(0.05)
    start = time.monotonic()
    executor.abort(ConnectionError("rank 2 is gone"))
    future.wait()
    assert time.monotonic() - start < 1
    with pytest.raises(ConnectionError, match="rank 2 is gone"):
        executor.check()
    assert reports == [], "whoever aborts knows already"
    later = submit(executor, lambda: pytest.fail("nothing runs after an abort"))
    assert later.done(), "and nobody waits for it"
    work.finish()


def test_the_rest_of_an_aborted_reduction_issues_nothing(executor: ThreadExecutor) -> None:
    first, second = FakeWork(), FakeWork()
    reached: list[str] = []

    def two_rounds() -> None:
        executor.wait(first)  # type: ignore[arg-type]
        executor.wait(second)  # type: ignore[arg-type]
        reached.append("the end")

    future = submit(executor, two_rounds)
    executor.abort(ConnectionError("rank 2 is gone"))
    first.finish()
    future.wait()
    executor.close()
    assert reached == []


def test_a_later_abort_does_not_replace_the_first_error(executor: ThreadExecutor) -> None:
    submit(executor, fail).wait()
    executor.abort(ConnectionError("consequence"))
    with pytest.raises(ZeroDivisionError):
        executor.check()


def late_partner(rank: int, world_size: int) -> str:
    group = dist.new_group()
    dist.barrier(group)
    # Only now: on a busy machine ranks need more than a second to connect.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    executor = ThreadExecutor(deadline=1)
    if rank == 0:
        job = lambda: executor.wait(dist.all_reduce(torch.ones(1), group=group, async_op=True))  # noqa: E731
        submit(executor, job).wait()
    dist.barrier()
    try:
        executor.check()
    except TimeoutError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_the_deadline_of_the_group_says_what_to_do() -> None:
    message, nothing = run_ranks(late_partner, 2, deadline=60)
    assert "not done after 1 s (step_timeout)" in message
    assert "Raise step_timeout" in message
    assert nothing == ""


def test_what_a_collective_raises_comes_out_of_the_wait(executor: ThreadExecutor) -> None:
    work = FakeWork()
    threading.Timer(0.05, work.finish, [RuntimeError("Connection closed by peer")]).start()
    submit(executor, lambda: executor.wait(work)).wait()  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        executor.check()


def test_a_collective_may_take_longer_than_a_slice_of_the_wait(executor: ThreadExecutor) -> None:
    work = FakeWork()
    threading.Timer(1.2, work.finish).start()
    start = time.monotonic()
    submit(executor, lambda: executor.wait(work)).wait()  # type: ignore[arg-type]
    executor.check()
    assert 1.2 <= time.monotonic() - start < 1.7


def test_after_an_abort_the_thread_leaves_the_collective_alone(executor: ThreadExecutor) -> None:
    submit(executor, lambda: executor.wait(FakeWork()))  # type: ignore[arg-type]
    executor.abort(ConnectionError("rank 2 is gone"))
    executor.close()
    assert not executor._thread.is_alive()


def test_a_finished_collective_does_not_block(executor: ThreadExecutor) -> None:
    work = FakeWork()
    work.finish()
    submit(executor, lambda: executor.wait(work)).wait()  # type: ignore[arg-type]
    executor.check()


def test_close_ends_the_thread() -> None:
    executor = executor_for(torch.device("cpu"), 1.0)
    assert isinstance(executor, ThreadExecutor)
    executor.close()
    executor.close()
    assert not executor._thread.is_alive()


def over_gloo(rank: int, world_size: int) -> tuple[float, float]:
    executor = ThreadExecutor(deadline=30)
    total = torch.zeros(64)

    def many() -> None:
        for _ in range(400):
            ones = torch.ones(64)
            executor.wait(dist.all_reduce(ones, async_op=True))
            total.add_(ones)

    submit(executor, many).wait()
    executor.check()
    if rank == 1:  # comes late, so that nothing is left over when the processes end
        time.sleep(2)
        dist.all_reduce(torch.ones(1))
        return float(total.mean()), 0.0
    work = dist.all_reduce(torch.ones(1), async_op=True)
    future = submit(executor, lambda: executor.wait(work))
    time.sleep(0.2)
    start = time.monotonic()
    executor.abort(ConnectionError("rank 1 is gone"))
    future.wait()
    seconds = time.monotonic() - start
    work.wait()
    return float(total.mean()), seconds


@pytest.mark.dist
def test_real_collectives_are_all_waited_for_and_a_blocked_one_can_be_left() -> None:
    """A wait that ends early would skip the rest of a reduction without an error: replicas would drift apart."""
    (total, seconds), (other_total, _) = run_ranks(over_gloo, 2, deadline=120)
    assert total == other_total == 800
    assert seconds < 1
