"""The parts of the watcher, in one process: what is counted, what is written down, when nobody is to blame."""

import json
import pickle
import random
import signal
import threading
import time

import pytest
import torch.distributed as dist

from lightning_sync.comm.agreement import StopAgreement
from lightning_sync.comm.board import Board
from lightning_sync.comm.failure import FailureRecord, RemoteFailure
from lightning_sync.comm.heartbeat import LifeTable, encode_beat
from lightning_sync.comm.watch import Watcher


def record(**changes):
    fields = {
        "rank": 1,
        "host": "a",
        "step": 17,
        "where": "reduction",
        "type_name": "ValueError",
        "message": "boom",
        "traceback_text": "",
        "reporter": 1,
    }
    return FailureRecord(**{**fields, **changes})


class UnprintableError(Exception):
    def __str__(self):
        raise KeyError("no text")


class TestFailureRecord:
    def test_reads_like_a_sentence(self):
        assert str(RemoteFailure(record())) == "rank 1 (host a) failed at step 17 in reduction: ValueError: boom"

    def test_keeps_the_traceback_and_its_causes(self):
        try:
            try:
                1 / 0  # noqa: B018
            except ZeroDivisionError as cause:
                raise ValueError("boom") from cause
        except ValueError as error:
            text = str(RemoteFailure(FailureRecord.of(error, 1, "a", 3, "backward")))
        assert "Traceback of rank 1" in text
        assert "ZeroDivisionError" in text

    def test_survives_the_store_and_pickling(self):
        there = record(message="naïve \ud800 \n text")
        assert FailureRecord.from_json(there.to_json()) == there
        assert pickle.loads(pickle.dumps(RemoteFailure(there))).record == there

    def test_is_bounded_and_never_raises(self):
        long = FailureRecord.of(ValueError("x" * 10**6), 0, "h" * 10**4, 1, "w" * 10**4)
        assert len(long.to_json()) < 25_000
        assert "cannot be made: KeyError" in FailureRecord.of(UnprintableError(), 0, "a", 1, "here").message

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", "\xff", record().to_json().replace("17", '"17"'), json.dumps({"rank": 1})]
    )
    def test_anything_else_is_refused(self, text):
        with pytest.raises(ValueError, match="failure record in the store"):
            FailureRecord.from_json(text)


class TestStopAgreement:
    def test_nobody_passes_a_count_that_it_published(self):
        agreement = StopAgreement()
        assert agreement.try_begin() is True
        assert agreement.freeze() == 1
        assert agreement.try_begin() is None
        assert agreement.count == 1

    def test_all_go_on_to_the_largest_count(self):
        agreement = StopAgreement()
        agreement.freeze()
        agreement.decide([0, 2, 1])
        assert [agreement.try_begin() for _ in range(4)] == [True, True, False, False]
        assert agreement.count == 2

    def test_a_published_count_never_changes(self):
        agreement = StopAgreement()
        agreement.freeze()
        agreement.decide([0, 1])
        agreement.try_begin()
        assert agreement.finish() == 0

    def test_out_of_lock_step_each_rank_stops_where_it_is(self):
        agreement = StopAgreement(lock_step=False)
        agreement.try_begin()
        agreement.freeze()
        assert agreement.try_begin() is False

    def test_a_finished_rank_begins_nothing(self):
        agreement = StopAgreement()
        agreement.finish()
        with pytest.raises(RuntimeError, match=r"after finish\(\)"):
            agreement.try_begin()


class TestLifeTable:
    def test_names_who_is_behind_and_who_is_silent(self):
        table = LifeTable(3, longest_gap=10)
        late = encode_beat(1, 4, False, "b", phase="waiting for data")
        table.observe({0: encode_beat(1, 5, False, "a"), 1: late, 2: "nonsense"}, 1)
        table.observe({0: encode_beat(2, 6, False, "a"), 1: late}, 3)
        text = "rank 1 (host b) at step 4 in waiting for data, last heard of 3.0 s ago"
        assert next(str(row) for row in table.behind(6)) == text
        assert [row.rank for row in table.silent(2)] == [1]  # rank 2 was never heard of: not started is not dead

    def test_a_finished_rank_is_neither(self):
        table = LifeTable(1, longest_gap=10)
        table.observe({0: encode_beat(1, 5, True, "a")}, 1)
        table.observe({0: encode_beat(1, 5, True, "a")}, 9)
        assert table.behind(6) == table.silent(2) == []

    def test_an_observer_that_was_suspended_blames_nobody(self):
        table = LifeTable(1, longest_gap=2)
        beat = {0: encode_beat(1, 5, False, "a")}
        table.observe(beat, 1)
        table.observe(beat, 3600)
        assert table.silent(2.5) == []


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 2)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return tcp if request.param == "tcp" else dist.PrefixStore("default_pg/0", tcp)


def watchers(store, count, **options):
    options = {"prefix": "fit-0", "interval": 0.02, "grace": 60.0, **options}
    return [Watcher(store, rank, count, **options) for rank in range(count)]


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


class TestWatcher:
    def test_a_failure_reaches_the_others_over_any_store(self, store):
        a, b = watchers(store, 2)
        called = []
        b.on_failure(called.append)
        a.report_failure(ValueError("boom"), "reduction")
        a.check()  # its own failure: the exception itself is on its way
        wait_for(lambda: called)
        with pytest.raises(RemoteFailure, match=r"rank 0 \(host .*\) failed at step 0 in reduction: ValueError: boom"):
            b.check()
        with pytest.raises(RemoteFailure):
            b.begin_step()
        late = []
        b.on_failure(late.append)
        assert late == called == [b.failure]
        for watcher in (b, a):
            watcher.close()

    def test_the_first_failure_of_the_run_wins(self, store):
        a, b = watchers(store, 2)
        a.report_failure(ValueError("first"), "here")
        b.report_failure(KeyError("second"), "there")
        assert a.failure.message == b.failure.message == "first"
        for watcher in (b, a):
            watcher.close()

    def test_a_stop_is_agreed_over_any_store(self, store):
        a, b = watchers(store, 2)
        assert not a.begin_step()
        assert not a.begin_step()
        b.request_stop("SIGTERM")
        wait_for(lambda: a.stop_at is not None and b.stop_at is not None)
        assert a.begin_step()
        assert [b.begin_step() for _ in range(3)] == [False, False, True]
        assert a.steps == b.steps == a.stop_at == 2
        assert a.stop_reason.startswith("SIGTERM on rank 1")
        for watcher in (b, a):
            watcher.close()

    def test_a_second_run_on_the_same_store_sees_nothing_of_the_first(self):
        store = dist.HashStore()
        (first,) = watchers(store, 1)
        first.report_failure(ValueError("boom"), "here")
        first.request_stop()
        first.close()
        (second,) = watchers(store, 1, prefix="fit-1")
        time.sleep(0.1)
        assert second.failure is None
        assert not second.begin_step()
        second.close()

    def test_a_rank_that_does_not_answer_a_stop_is_named(self):
        a = Watcher(dist.HashStore(), 0, 3, prefix="p", interval=0.02, grace=0.1, stop_timeout=0.2)
        a.request_stop("SIGTERM")
        wait_for(lambda: a.stop_reason)
        with pytest.raises(TimeoutError, match=r"SIGTERM on rank 0.*ranks \[1, 2\] have not said within 0.2 s"):
            a.begin_step()
        a.close()

    def test_stragglers_are_named_without_a_store_call(self):
        a, b = watchers(dist.HashStore(), 2)
        a.begin_step()
        wait_for(lambda: [row.rank for row in a.missing(1)] == [1] and a.missing(1)[0].host != "?")
        assert [row.rank for row in a.stragglers()] == [1]
        b.finish()
        wait_for(lambda: a.stragglers() == [])
        for watcher in (b, a):
            watcher.close()

    def test_reports_do_not_raise_when_the_store_is_gone(self, monkeypatch):
        (a,) = watchers(dist.HashStore(), 1)

        def gone(*_):
            raise RuntimeError("Connection reset by peer")

        monkeypatch.setattr(Board, "news", gone)
        wait_for(lambda: a.failure)
        assert "rank 0's host, which keeps the store, is gone: Connection reset by peer" in str(a.failure)
        a.report_failure(ValueError("boom"), "here")
        a.close()

    def test_a_failing_callback_does_not_stop_the_others(self, caplog):
        a, b = watchers(dist.HashStore(), 2)
        called = []
        b.on_failure(lambda failure: called[1])
        b.on_failure(called.append)
        a.report_failure(ValueError("boom"), "here")
        wait_for(lambda: called)
        assert "IndexError" in caplog.text
        for watcher in (b, a):
            watcher.close()

    def test_rubbish_in_the_store_is_a_failure_not_a_dead_watcher(self):
        store = dist.HashStore()
        (a,) = watchers(store, 1)
        board = Board(store, "fit-0")
        board.claim("failure", "rubbish")
        wait_for(lambda: a.failure)
        with pytest.raises(
            RemoteFailure, match="in the watcher: ValueError: a failure record in the store is not JSON"
        ):
            a.check()
        a.close()

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"prefix": ""}, "prefix is empty"),
            ({"rank": 2}, r"rank=2 must be from 0 to world_size - 1 \(world_size=2\)"),
            ({"interval": 0.0}, "interval=0.0 must be a number of seconds above 0"),
            ({"lost_after": -1.0}, "lost_after=-1.0 must be"),
            ({"exit_code": 0}, "exit_code=0 must be from 1 to 255"),
        ],
    )
    def test_bad_arguments_are_named(self, changes, text):
        with pytest.raises(ValueError, match=text):
            Watcher(**{"store": dist.HashStore(), "rank": 0, "world_size": 2, "prefix": "p", **changes})


class TestCost:
    def test_begin_step_costs_less_than_two_microseconds(self):
        (a,) = watchers(dist.HashStore(), 1, interval=0.5)
        best = float("inf")
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(2_000):
                a.begin_step()
            best = min(best, (time.perf_counter() - began) / 2_000)
        a.close()
        assert best < 2e-6

    def test_an_idle_watcher_makes_about_two_calls_per_interval(self, monkeypatch):
        calls = []
        for name in ("news", "post", "claim", "put", "add", "has", "read", "read_all"):
            original = getattr(Board, name)
            monkeypatch.setattr(Board, name, lambda *a, _f=original, _n=name, **k: calls.append(_n) or _f(*a, **k))
        (a,) = watchers(dist.HashStore(), 1, interval=0.05)
        wait_for(lambda: calls.count("news") == 3)
        calls.clear()
        wait_for(lambda: calls.count("news") == 10)
        assert len(calls) <= 21
        a.close()


class TestLockStep:
    """Many agreements between threads, each step a barrier, as a collective is."""

    @pytest.mark.parametrize("seed", range(30))
    def test_all_stop_after_the_same_number_of_steps(self, seed):
        dice = random.Random(seed)
        size = dice.choice([2, 3, 4])
        group = watchers(dist.HashStore(), size, interval=0.004)
        barrier = threading.Barrier(size, timeout=20)
        asking = {rank: dice.randrange(40) for rank in dice.sample(range(size), dice.randint(1, size))}
        ends = [0] * size

        def train(rank, own):
            for step in range(400):
                if asking.get(rank) == step:
                    group[rank].request_stop()
                if group[rank].begin_step():
                    break
                time.sleep(own.random() * 0.002)
                barrier.wait()
            ends[rank] = group[rank].steps

        threads = [threading.Thread(target=train, args=(r, random.Random(100 * seed + r))) for r in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for watcher in reversed(group):
            watcher.close()
        assert len(set(ends)) == 1, ends
        assert ends[0] < 400

    def test_signals_between_any_two_bytecodes_do_no_harm(self):
        (a,) = watchers(dist.HashStore(), 1)
        before = signal.signal(signal.SIGALRM, lambda *_: a.request_stop("SIGALRM"))
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        try:
            until = time.monotonic() + 10
            while not a.begin_step():
                assert time.monotonic() < until
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert a.steps == a.stop_at
        a.close()
