"""A loader that goes on until those of all ranks have ended, and can be interrupted."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader

from lightning_sync.comm.attendance import KnownLengths
from lightning_sync.strategies.joined import JoinedLoader, StatefulJoinedLoader, joined


class Resumable:
    """Numbers from 0, and where it is."""

    def __init__(self, length: int) -> None:
        self.length, self.position, self.start = length, 0, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for i in range(start, self.length):
            self.position = i + 1
            yield i

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


def make(loader: Any, *lengths: int) -> JoinedLoader:
    attendance = KnownLengths(lengths)
    return joined(loader, attendance, attendance.miss)


def run(loader: JoinedLoader, most: int | None = None) -> list[tuple[Any, bool]]:
    """What a loop sees: batches, and whether they are no data."""
    seen = []
    for batch in islice(loader, most):
        loader.taken += 1
        seen.append((batch, loader.spare))
    return seen


def test_it_repeats_the_last_batch_as_no_data_pass_after_pass() -> None:
    loader = make(range(3), 3, 5)
    assert len(loader) == 5
    for _ in range(2):
        assert run(loader) == [(0, False), (1, False), (2, False), (2, True), (2, True)]
        assert loader.ended
    assert run(make(range(5), 3, 5)) == [(i, False) for i in range(5)]
    assert run(make([], 0, 2)) == [([], True), ([], True)]


def test_a_loader_that_ends_before_its_length_is_an_error() -> None:
    class Liar(Resumable):
        def __iter__(self) -> Iterator[int]:
            return iter(range(2))

    with pytest.raises(RuntimeError, match="said that it has 4 batches, but ended after 2"):
        run(make(Liar(4), 4, 5))


def test_it_looks_like_the_loader_it_stands_for() -> None:
    inner = DataLoader(range(6), batch_size=2)  # type: ignore[arg-type]
    loader = make(inner, 3, 4)
    assert loader.batch_size == 2
    assert loader.dataset is inner.dataset
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = loader.nothing_like_this
    assert sized_len(loader) == 4
    assert copy.copy(loader).loader is inner
    assert not hasattr(loader, "state_dict")


@pytest.mark.parametrize("taken", [1, 3, 4, 5, 7])
def test_it_goes_on_where_it_was_also_without_data_and_anew_after_the_end(taken: int) -> None:
    whole = run(make(Resumable(4), 4, 7))
    first = make(Resumable(4), 4, 7)
    begun = run(first, taken)
    assert isinstance(first, StatefulJoinedLoader)
    second = make(Resumable(4), 4, 7)
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict({**state, "loader": {"position": 0}} if taken == 7 else state)  # as such loaders do
    rest = run(second)
    if taken == 7:
        assert rest == whole, "a new pass"
    else:
        assert [spare for _, spare in begun + rest] == [spare for _, spare in whole]
        assert [b for b, spare in begun + rest if not spare] == [0, 1, 2, 3]
    assert run(second) == whole
