"""Periods and schedules: when fragments travel."""

import pytest

import lightning_sync as ls
from lightning_sync.periodic.period import Every, Progress, Seconds, as_period
from lightning_sync.periodic.schedule import Schedule


def progress(exchanges: int = 0, lr: float = 0.1, seconds: float = 0.0) -> Progress:
    return Progress(exchanges, lr, seconds)


def test_one_fragment_without_overlap_meets_every_h_steps() -> None:
    schedule = Schedule(Every(4))
    assert [s for s in range(1, 13) if schedule.ends(s)] == [4, 8, 12]
    assert [s for s in range(1, 13) if schedule.starts(s)] == [4, 8, 12]


@pytest.mark.parametrize(("every", "fragments", "overlap"), [(8, 2, 3), (64, 4, 6), (10, 3, 2), (7, 7, 0), (5, 1, 4)])
def test_fragments_are_staggered_and_never_meet_in_flight(every: int, fragments: int, overlap: int) -> None:
    schedule = Schedule(Every(every), fragments, overlap)
    in_flight: set[int] = set()
    ends = dict.fromkeys(range(fragments), 0)
    for step in range(1, 6 * every + 1):
        started = schedule.starts(step)
        in_flight.update(started)
        assert len(in_flight) <= 1, "one at a time"
        for p in schedule.ends(step):
            assert p in in_flight, "nothing ends that has not started"
            in_flight.remove(p)
            ends[p] += 1
    assert set(ends.values()) == {6}, "each fragment travels once per period"


def test_growing_periods() -> None:
    period = ls.Growing(start=2, factor=2.0, every=3, limit=10)
    assert [period.length(progress(k)) for k in range(12)] == [2, 2, 2, 4, 4, 4, 8, 8, 8, 10, 10, 10]


def test_the_quadratic_rule_follows_the_learning_rate() -> None:
    period = ls.QuadraticRule(base=4, coefficient=0.08, limit=500)
    assert [period.length(progress(lr=lr)) for lr in (0.1, 0.01, 0.005, 0.0)] == [4, 64, 256, 500]


def test_seconds_become_steps_once_a_step_has_been_measured() -> None:
    assert Seconds(3.0, first=8).length(progress()) == 8
    assert Seconds(3.0).length(progress(seconds=0.1)) == 30
    assert Seconds(3.0).length(progress(seconds=100)) == 1


def test_periods_that_vary_take_the_agreed_length() -> None:
    schedule = Schedule(ls.Growing(start=2, every=1, limit=50), overlap=1)
    schedule.begin(progress())
    assert [s for s in range(1, 5) if schedule.ends(s)] == [2]
    assert schedule.starts(1) == [0]
    schedule.agreed(2, schedule.propose(progress(1)))
    assert [s for s in range(3, 10) if schedule.ends(s)] == [6]
    restored = Schedule(ls.Growing(start=2, every=1, limit=50), overlap=1)
    restored.load_state_dict(schedule.state_dict())
    assert restored.ends(6) == [0]


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "8"])
def test_a_period_below_one_or_of_another_type_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="sync_every"):
        as_period(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 8, "overlap_steps": 8}, r"overlap_steps=8 must be smaller than the 8 steps"),
        ({"sync_every": 8, "fragments": 4, "overlap_steps": 2}, r"overlap_steps=2 must be smaller than the 2 steps"),
        ({"sync_every": 2, "fragments": 3}, r"fragments=3 with sync_every=2"),
        ({"sync_every": ls.Growing(), "fragments": 2}, r"fragments=2 needs a fixed sync_every"),
        ({"overlap_steps": True}, r"overlap_steps=True"),
        ({"overlap_steps": -1}, r"overlap_steps=-1"),
        ({"local_weight": 1.5}, r"local_weight=1.5"),
        ({"elastic": 0}, r"elastic=0"),
        ({"elastic": 0.5, "outer_optimizer": ls.Nesterov()}, r"elastic=0.5"),
        ({"buffers": "mean"}, r"buffers='mean'.*'average', 'rank0'"),
        ({"inner_state": "drop"}, r"inner_state='drop'.*'keep', 'average', 'reset'"),
        ({"inner_state": "average", "overlap_steps": 2}, r"needs overlap_steps=0"),
        ({"outer_optimizer": "adam"}, r"outer_optimizer='adam'.*expected None"),
        ({"outer_optimizer": lambda tensors: 3}, r"made a int, not a torch optimiser"),
        ({"outer_optimizer": lambda tensors: 1 / 0}, r"does not make an optimiser: division by zero"),
        ({"sync_every_seconds": 0}, r"sync_every_seconds=0"),
        ({"warmup_steps": -3}, r"warmup_steps=-3"),
        ({"fragments": 0}, r"fragments=0"),
        ({"fragments": True}, r"fragments=True"),
        ({"fragments": None}, r"fragments=None"),
        ({"fragments": "layers.*"}, r"fragments='layers"),
        ({"sync_every": 4, "sync_every_seconds": 2.0}, r"sync_every=4 and sync_every_seconds=2.0 both"),
        ({"elastic": 0.5, "local_weight": 0.5}, r"elastic=0.5"),
        ({"outer_scheduler": "cosine"}, r"outer_scheduler='cosine'"),
        ({"outer_optimizer": ls.Nesterov}, r"outer_optimizer=.*Nesterov.*expected None"),
        ({"fragments": []}, r"fragments=\[\]"),
        ({"replica": 0}, r"replica=0"),
    ],
)
def test_wrong_values_are_refused_at_construction(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ls.HybridStrategy(**options)  # type: ignore[arg-type]


def test_a_misspelt_option_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"unknown argument sync_evry\. Did you mean sync_every\?"):
        ls.HybridStrategy(sync_evry=4)
