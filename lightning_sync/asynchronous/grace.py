"""How long to wait for the others once enough replicas have delivered: by when each of them is used to deliver.

Pure functions of times in seconds. The mean gap between two deliveries and its mean deviation follow Jacobson 1988,
"Congestion avoidance and control", section 2, with his gains 1/8 and 1/4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Rhythm:
    """When one replica delivers.

    Attributes:
        last: Time of its last delivery.
        gap: Mean time between two deliveries; 0 while there was only one.
        deviation: Mean distance of a gap from the mean.
    """

    last: float
    gap: float = 0.0
    deviation: float = 0.0

    @property
    def expected(self) -> float:
        """When its next delivery should be in, two deviations included."""
        return self.last + self.gap + 2 * self.deviation


def heard(rhythm: Rhythm | None, now: float) -> Rhythm:
    """The rhythm after a delivery now; `None` is a replica never heard of."""
    if rhythm is None:
        return Rhythm(now)
    gap = now - rhythm.last
    if rhythm.gap == 0:
        return Rhythm(now, gap, gap / 2)
    error = gap - rhythm.gap
    return Rhythm(now, rhythm.gap + error / 8, rhythm.deviation + (abs(error) - rhythm.deviation) / 4)


def grace_ends(quorum_at: float, share: float, rhythms: Sequence[Rhythm], missing: Sequence[Rhythm]) -> float:
    """When to wait no longer: after the last of the missing that is expected in the window, at most at its end.

    The window is `share` of the replicas' median gap. Who is expected only after it is not waited for at all, so one
    slow or failed replica costs nothing; while no gap is known yet the window is empty.

    Args:
        quorum_at: When the quorum was complete.
        share: The window as a share of the median gap. Higher waits for more replicas and makes steps later.
        rhythms: Of all replicas heard of.
        missing: Of those that have not delivered and still may.
    """
    gaps = [r.gap for r in rhythms if r.gap > 0]
    window = quorum_at + share * median(gaps) if gaps else quorum_at
    known = [r for r in missing if r.gap > 0]
    # Their usual gap decides who is waited for, deviations only how long: a jittery replica is not given up early.
    return max((min(r.expected, window) for r in known if r.last + r.gap <= window), default=quorum_at)
