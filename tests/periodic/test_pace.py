"""Seconds per step leave validation out."""

from lightning_sync.periodic.pace import Pace


def test_pauses_do_not_count() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])
    assert pace.seconds(0) == 0.0
    now[0] += 4
    assert pace.seconds(2) == 2.0
    pace.pause()
    now[0] += 1000
    pace.go_on()
    assert pace.seconds(2) == 2.0
    pace.go_on()  # one without a pause changes nothing
    pace.mark(2)
    now[0] += 3
    assert pace.seconds(3) == 3.0


def test_counting_may_begin_again_within_a_pause() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.pause()
    now[0] += 10
    pace.mark(5)
    now[0] += 10
    pace.go_on()
    now[0] += 6
    assert pace.seconds(8) == 2.0
