"""Three ways to know who still has data, and what all ranks then see alike."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from lightning_sync.comm.attendance import AskedInStep, Attendance, KnownLengths, NotedInStore
from tests.workers import run_ranks

LENGTHS = (3, 0, 7, 5)


def walk(attendance: Attendance, length: int, pause: float = 0.0) -> list[bool]:
    """One pass of a rank with `length` items: for every index, whether this rank had an item."""
    attendance.begin()
    seen: list[bool] = []
    while True:
        if len(seen) < length:
            attendance.take(len(seen))
        elif not attendance.miss(len(seen)):
            return seen
        seen.append(len(seen) < length)
        time.sleep(pause)


def expected(rank: int) -> list[bool]:
    return [i < LENGTHS[rank] for i in range(max(LENGTHS))]


def test_known_lengths() -> None:
    attendance = KnownLengths(LENGTHS)
    assert attendance.length == 7
    assert [walk(attendance, n) for n in LENGTHS] == [expected(r) for r in range(4)]
    assert attendance.present(4) == [False, False, True, True]


def together(body: Callable[[int], Any]) -> list[Any]:
    found: list[Any] = [None] * len(LENGTHS)

    def run(rank: int) -> None:
        found[rank] = body(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(LENGTHS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("slow", [0, 2, 3])
def test_notes_in_the_store_end_all_ranks_alike_pass_after_pass(slow: int) -> None:
    store = HashStore()

    def body(rank: int) -> list[list[bool]]:
        attendance = NotedInStore(store, "data", rank, len(LENGTHS))
        try:
            return [walk(attendance, LENGTHS[rank], 0.02 if rank == slow else 0.0) for _ in range(3)]
        finally:
            attendance.close()

    assert together(body) == [[expected(rank)] * 3 for rank in range(4)]


def test_as_long_as_everybody_has_data_the_main_thread_makes_no_store_call() -> None:
    attendance = NotedInStore(HashStore(), "data", 0, 2)
    attendance._board = None  # type: ignore[assignment]
    attendance.begin()
    begin = time.perf_counter()
    for index in range(10_000):
        attendance.take(index)
    assert time.perf_counter() - begin < 0.5
    attendance.close()


def test_a_rank_that_waits_notices_that_the_run_has_failed() -> None:
    def check() -> None:
        raise RuntimeError("rank 1 has failed")

    attendance = NotedInStore(HashStore(), "data", 0, 2, check)
    attendance.begin()
    with pytest.raises(RuntimeError, match="rank 1 has failed"):
        attendance.miss(0)
    attendance.close()


def asked(rank: int, world: int) -> Any:
    group = dist.new_group(backend="gloo")
    attendance = AskedInStep(group, rank, world)
    walks = [walk(attendance, LENGTHS[rank]) for _ in range(3)]
    attendance.begin()
    for index in range(2):
        attendance.take(index) if index < LENGTHS[rank] else attendance.miss(index)
    return walks, attendance.present(1), list(attendance._asked)


@pytest.mark.dist
def test_ranks_in_step_ask_each_other_and_know_who_has_what() -> None:
    for rank, (walks, present, kept) in enumerate(run_ranks(asked, 4)):
        assert walks == [expected(rank)] * 3
        assert present == [True, False, True, True]
        assert kept == [1], "answers that nobody will read again are dropped"
