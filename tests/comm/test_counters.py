"""Counters go on from where they were saved."""

from fractions import Fraction

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.topology import Bytes


def test_what_was_saved_is_what_is_loaded() -> None:
    counters = Counters(steps=3)
    counters.count(100, Bytes(Fraction(4, 3), 7), messages=2)
    counters.count_dense(Bytes(10))
    saved = counters.state_dict()
    assert all(isinstance(v, (int, float, list)) for v in saved.values())
    again = Counters()
    again.load_state_dict(saved)
    assert again == counters
    again.count(1, Bytes(1, 1))
    assert again.sent == Bytes(Fraction(7, 3), 8)


def test_a_wait_that_cannot_be_measured_stays_unmeasured() -> None:
    counters = Counters(wait_seconds=None)
    counters.load_state_dict(Counters(wait_seconds=2.5).state_dict())
    assert counters.wait_seconds is None
    measured = Counters()
    measured.load_state_dict(Counters(wait_seconds=None).state_dict())
    assert measured.wait_seconds == 0
