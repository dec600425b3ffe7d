"""Whose fault it is that a step takes too long, and which time counts."""

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from lightning_sync.comm.failure import RemoteFailure
from lightning_sync.comm.heartbeat import LifeTable, Straggler, encode_beat
from lightning_sync.comm.process import identity, state_of
from lightning_sync.comm.progress import BACKWARD, FORWARD, VALIDATION, StepClock, explain_missing, who_is_missing
from lightning_sync.comm.stacks import StackFile
from lightning_sync.comm.watch import Watcher


def at(rank, step, place, *, rounds=0, percent=100, silent=0.5):
    return Straggler(rank, "a", step, silent, place.phase, place.order, rounds, percent, place.paused)


class TestWhoIsMissing:
    def test_the_rank_behind_by_step_then_phase_then_collectives(self):
        waiting = at(0, 7, BACKWARD, rounds=4)
        for late in (at(1, 6, BACKWARD), at(1, 7, FORWARD), at(1, 7, BACKWARD, rounds=3)):
            assert who_is_missing([waiting, late, at(2, 7, BACKWARD, rounds=4)], 10) == [late]

    def test_a_silent_rank_wherever_it_was(self):
        silent = at(1, 9, BACKWARD, silent=11.0)
        assert who_is_missing([at(0, 7, FORWARD), silent], 10) == [silent]

    def test_a_slow_rank_that_moves_is_not_to_blame(self):
        stuck = at(0, 50, FORWARD)
        assert who_is_missing([stuck, at(1, 10, FORWARD, percent=3)], 10) == [stuck]

    def test_nobody_behind_is_said(self):
        rows = [at(0, 7, BACKWARD), at(1, 7, BACKWARD)]
        missing = who_is_missing(rows, 10)
        assert missing == rows
        assert "no rank is behind another" in explain_missing(missing, rows, 120)

    def test_the_message_names_everybody(self):
        rows = [at(0, 7, BACKWARD), at(1, 7, FORWARD), at(2, 7, FORWARD)]
        text = explain_missing(who_is_missing(rows, 10), rows, 120)
        assert text == (
            "its step has not ended within 120 s (step_timeout), last heard of 0.5 s ago; missing too: rank 2 (host a) "
            "at step 7 in forward, last heard of 0.5 s ago; waiting for it: ranks 0"
        )


class TestClock:
    def test_counts_a_step_without_pauses_and_suspended_time(self):
        clock = StepClock(10, 100, longest_gap=2)
        for now, step, paused in [
            (0, 1, False),
            (1, 2, False),
            (2, 2, False),
            (4, 2, True),
            (5, 2, False),
            (99, 2, False),
        ]:
            clock.tick(now, step, paused)
        assert clock.seconds == 1 + 1 + 2
        assert clock.percent == 40
        clock.tick(100, 3, False)
        assert clock.percent == 0

    def test_the_first_step_may_take_longer(self):
        clock = StepClock(10, 100, longest_gap=1000)
        clock.tick(0, 1, False)
        clock.tick(50, 1, False)
        assert (clock.limit, clock.percent) == (100, 50)

    def test_others_pause_it(self):
        table = LifeTable(3, longest_gap=10)
        assert table.pausing(0, 5), "ranks never heard of may still set up"
        for phase, paused, step in [("validation", True, 5), ("forward", False, 1)]:
            beats = {0: encode_beat(1, 5, False, "a"), 1: encode_beat(1, step, False, "a", phase=phase, paused=paused)}
            table.observe({**beats, 2: encode_beat(step, 9, True, "a")}, 1)
            assert table.pausing(0, 5)
        assert not table.pausing(0, 1), "all are in their first step"
        table.observe({1: encode_beat(2, 4, False, "a", phase="forward")}, 1)
        assert not table.pausing(0, 5)


class TestProcess:
    def test_alive_stopped_and_gone(self):
        if not sys.platform.startswith("linux"):
            assert state_of(identity()) == "unknown"
            return
        assert state_of(identity()) == "running"
        child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
        name = identity().replace(str(os.getpid()), str(child.pid), 1)
        until = time.monotonic() + 20
        while state_of(name) != "stopped":
            assert time.monotonic() < until
        child.kill()
        while state_of(name) != "gone":  # a zombie: nobody has waited for it
            assert time.monotonic() < until
        child.wait()
        assert state_of(name) == "gone"

    @pytest.mark.parametrize("name", ["", "1", "x y", f"{os.getpid()} another host"])
    def test_what_is_not_of_this_machine_is_unknown(self, name):
        assert state_of(name) == "unknown"


class TestStacks:
    def test_later_ones_go_below_the_first(self, tmp_path):
        stacks = StackFile(tmp_path / "deep" / "stacks", 3)
        stacks.dump("one")
        stacks.dump("two")
        text = (tmp_path / "deep" / "stacks" / "rank-3.txt").read_text()
        assert text.index("one") < text.index("test_later_ones_go_below_the_first") < text.index("two")

    def test_no_folder_is_no_failure(self, tmp_path, capfd):
        (tmp_path / "file").touch()
        StackFile(tmp_path / "file" / "stacks", 0).dump("why")
        StackFile(None, 0).dump("why")
        assert "cannot be written to" in capfd.readouterr().err


class TestWatchers:
    """Two watchers in one process, on clocks of tenths of seconds."""

    def watchers(self, tmp_path):
        store = dist.HashStore()
        options = {"prefix": "fit-0", "interval": 0.02, "grace": 60.0, "step_timeout": 0.6, "stacks": tmp_path}
        return [Watcher(store, rank, 2, **options) for rank in range(2)]

    def test_the_rank_behind_is_told_to_both(self, tmp_path):
        a, b = self.watchers(tmp_path)
        for _ in range(3):
            a.begin_step()
            b.begin_step()
        a.place, b.place = BACKWARD, FORWARD
        until = time.monotonic() + 10
        while not (a.failure and b.failure):
            assert time.monotonic() < until
            time.sleep(0.01)
        for watcher in (a, b):
            with pytest.raises(RemoteFailure, match=r"rank 1 .*at step 3 in forward: TimeoutError: its step has not"):
                watcher.check()
        for watcher in (b, a):
            watcher.close()
        assert {p.name for p in tmp_path.iterdir()} == {"rank-0.txt", "rank-1.txt"}

    def test_a_pause_of_one_rank_stops_the_clock_of_all(self, tmp_path):
        a, b = self.watchers(tmp_path)
        for _ in range(3):
            a.begin_step()
            b.begin_step()
        a.place = BACKWARD
        with b.at(VALIDATION):
            time.sleep(1.5)
            assert a.failure is None
            assert b.failure is None
        for watcher in (b, a):
            watcher.close()
