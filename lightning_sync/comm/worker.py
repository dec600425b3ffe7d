"""Where reductions run: one thread, one order, and no wait that a failure cannot end.

Collectives of a group must be issued in the same order on every rank. Reductions with several dependent rounds would
break that if each started its next round as soon as the one before was done, so whole reductions run one after the
other, in the order in which they were submitted: DDP's bucket order, which is the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

_SLICE = timedelta(seconds=0.5)
_SLICE_OVER = "Operation timed out!"

OnError = Callable[[BaseException, str], None]


def wait_in_slices(work: dist.Work, given_up: Callable[[], bool]) -> bool:
    """Wait for a collective of gloo on a thread that may have to give it up.

    Returns:
        Whether it is done; False as soon as `given_up()`, half a second later at most.
    """
    while not given_up():
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            if not work.is_completed():  # only the slice is over
                continue
            if not str(error).startswith(_SLICE_OVER):
                raise
            work.wait()  # it was completed as the slice ended
        return True
    return False


class Promise:
    """A future for DDP, and the tensor it will hold; completed once, by whoever comes first."""

    def __init__(self, future: torch.futures.Future[Tensor], result: Tensor) -> None:
        self.future = future
        self._result = result
        self._lock = threading.Lock()
        self._done = False

    def complete(self) -> None:
        """Let the waiting side go on."""
        with self._lock:
            if self._done:
                return
            self._done = True
        self.future.set_result(self._result)


class Executor(ABC):
    """Runs reductions in the order of submission.

    Args:
        on_error: Called once, with the first exception and what was being done.

    A failing reduction never leaves through its future: DDP would turn it into an unreadable cast error. The future
    completes with the tensor as it is, every later one does so at once, and `check` raises the original exception on
    the training thread.
    """

    def __init__(self, on_error: OnError | None = None) -> None:
        self.error: BaseException | None = None
        self.rounds = 0  # collectives waited for so far: tells which rank of a blocked group has not come
        self._on_error = on_error

    @abstractmethod
    def promise(self, result: Tensor) -> Promise:
        """A promise of `result`, to be handed to `submit` together with the job that computes it."""

    @abstractmethod
    def submit(self, job: Callable[[], None], promises: Sequence[Promise], where: str) -> None:
        """Queue `job`; the promises complete once it has run, or has failed."""

    @abstractmethod
    def wait(self, work: dist.Work) -> None:
        """Block until a collective that was issued by a running job is done."""

    def check(self) -> None:
        """Raise the first exception of any reduction."""
        if self.error is not None:
            raise self.error

    def abort(self, error: BaseException) -> None:
        """Give up what is running and queued (any thread); `check` raises `error` if nothing failed before."""
        if self.error is None:
            self.error = error

    def close(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Stop accepting jobs and release the thread, if there is one."""

    def _run(self, job: Callable[[], None], where: str) -> None:
        if self.error is not None:
            return
        try:
            job()
        except BaseException as error:  # everything, KeyboardInterrupt included, has to reach the training thread
            if self.error is None:
                self.error = error
                if self._on_error is not None:
                    self._on_error(error, where)


class ThreadExecutor(Executor):
    """Reductions on a thread of their own, for gloo on the CPU.

    A collective of gloo cannot be interrupted. So the thread waits for it in slices, and after `abort` leaves it alone:
    a Python thread that comes back from C++ while the interpreter ends would abort the process. The promises complete
    at once: the training thread goes on, `check` raises, and the process ends.

    Args:
        deadline: Seconds one collective may take; for the message only, the process group has the clock.
        on_error: See `Executor`.
    """

    def __init__(self, deadline: float = 120.0, on_error: OnError | None = None) -> None:
        super().__init__(on_error)
        self.deadline = deadline
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Sequence[Promise], str] | None] = queue.SimpleQueue()
        self._open: dict[int, Promise] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="lightning_sync-comm", daemon=True)
        self._thread.start()

    @override
    def promise(self, result: Tensor) -> Promise:
        promise = Promise(torch.futures.Future(), result)
        with self._lock:
            self._open[id(promise)] = promise
            aborted = self.error is not None
        if aborted:
            promise.complete()
        return promise

    @override
    def submit(self, job: Callable[[], None], promises: Sequence[Promise], where: str) -> None:
        self._queue.put((job, promises, where))

    @override
    def wait(self, work: dist.Work) -> None:
        self.rounds += 1
        # Not through `work.get_future().add_done_callback`: called while gloo completes the future, it dead-locks
        # now and then (torch 2.13, seen in 2 of 15 starts on a loaded machine).
        try:
            done = wait_in_slices(work, lambda: self.error is not None)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            raise TimeoutError(
                f"a collective was not done after {self.deadline:g} s (step_timeout): another rank has stopped, hangs, "
                "or has not reached this point. Raise step_timeout if a step may take that long."
            ) from error
        if not done:  # aborted: the rest of this reduction has no partners
            assert self.error is not None
            raise self.error

    @override
    def abort(self, error: BaseException) -> None:
        super().abort(error)
        with self._lock:
            promises = list(self._open.values())
        for promise in promises:
            promise.complete()

    @override
    def close(self) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            job, promises, where = item
            self._run(job, where)
            for promise in promises:
                promise.complete()
                with self._lock:
                    del self._open[id(promise)]


class StreamExecutor(Executor):
    """Reductions on a CUDA side stream, issued at once by the calling thread, in its order.

    NCCL collectives return to the host before they are done, so no thread is needed and the host does not wait; kernels
    and collectives of a reduction follow each other on the side stream. Not run on GPUs yet.
    """

    def __init__(self, device: torch.device, on_error: OnError | None = None) -> None:
        super().__init__(on_error)
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @override
    def promise(self, result: Tensor) -> Promise:
        result.record_stream(self._stream)
        return Promise(torch.futures.Future(devices=[self.device]), result)

    @override
    def submit(self, job: Callable[[], None], promises: Sequence[Promise], where: str) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._run(job, where)
            for promise in promises:
                promise.complete()  # records the side stream; DDP's stream will wait for it

    @override
    def wait(self, work: dist.Work) -> None:
        self.rounds += 1
        work.wait()  # makes the side stream wait, not the host


def executor_for(device: torch.device, deadline: float, on_error: OnError | None = None) -> Executor:
    """The executor that suits a device."""
    if device.type == "cuda":
        return StreamExecutor(device, on_error)
    return ThreadExecutor(deadline, on_error)
