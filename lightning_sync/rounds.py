"""Rounds of reductions that go in lock-step, some encoding while others travel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from lightning_sync.comm.wire import Wire
from lightning_sync.compressors.base import Payload, Reduction


def drive(runs: Sequence[Reduction], wire: Wire) -> list[Sequence[Tensor]]:
    """Run reductions in lock-step: round k of all of them is one `Wire.round`."""
    return next(drive_each([runs], wire))[1]


def drive_each(
    buckets: Iterable[Sequence[Reduction]], wire: Wire, depth: int = 3
) -> Iterator[tuple[int, list[Sequence[Tensor]]]]:
    """Run the reductions of several buckets, encoding some while others travel.

    At most `depth` buckets are under way. Which round is issued when depends on the number of rounds alone, never on
    timing, so all ranks issue the same collectives in the same order.

    Args:
        buckets: Reductions that go in lock-step; taken one bucket at a time, as soon as there is room for it.
        wire: The group.
        depth: More hides longer encoding, and holds more payloads.

    Yields:
        A bucket's place and what its reductions returned, as soon as they have, while others travel.
    """
    under_way: deque[tuple[_Bucket, Callable[[], list[Payload]]]] = deque()
    done: list[tuple[int, list[Sequence[Tensor]]]] = []

    def advance(bucket: _Bucket, answers: list[Payload] | None) -> None:
        with wire.phase("encode" if answers is None else "decode"):
            payloads = bucket.next_round(answers)
        if payloads:
            under_way.append((bucket, wire.start(payloads)))
        else:
            done.append((bucket.place, bucket.results))

    for place, runs in enumerate(buckets):
        while len(under_way) >= depth:
            bucket, finish = under_way.popleft()
            advance(bucket, finish())
        advance(_Bucket(place, runs), None)
        yield from done  # after the next bucket is on its way
        done.clear()
    while under_way:
        bucket, finish = under_way.popleft()
        advance(bucket, finish())
        yield from done
        done.clear()


class _Bucket:
    """Reductions in lock-step, and what those that have ended returned."""

    def __init__(self, place: int, runs: Sequence[Reduction]) -> None:
        self.place = place
        self.results: list[Sequence[Tensor]] = [()] * len(runs)
        self._runs = list(enumerate(runs))

    def next_round(self, answers: Sequence[Payload] | None) -> list[Payload]:
        """Send every reduction its answer of the last round (`None`: start it); returns what they emit next."""
        payloads, still = [], []
        for place, (i, run) in enumerate(self._runs):
            try:
                payloads.append(next(run) if answers is None else run.send(answers[place]))
                still.append((i, run))
            except StopIteration as stop:
                self.results[i] = stop.value
        self._runs = still
        return payloads
