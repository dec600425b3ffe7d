"""How long to wait for the others once enough replicas have delivered: by when each of them is used to deliver.

Pure functions of times in seconds. The mean gap between two deliveries and its mean deviation follow Jacobson 1988,
"Congestion avoidance and control", section 2, with his gains 1/8 and 1/4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from statistics import median


@dataclass(frozen=True)
class Rhythm:
    """When one replica delivers.

    Attributes:
        last: Time of its last delivery, or of its start; nan after it has left: nobody knows when it will deliver next.
        gap: Mean time between two deliveries.
        deviation: Mean distance of a gap from the mean.
    """

    last: float
    gap: float
    deviation: float


def heard(rhythm: Rhythm | None, now: float) -> Rhythm:
    """The rhythm after a delivery now; `None` is a replica never heard of, which started at time 0."""
    if rhythm is None:
        return Rhythm(now, now, now / 2)
    if isnan(rhythm.last):
        return replace(rhythm, last=now)
    if rhythm.gap == 0:  # its first delivery was the beginning
        return Rhythm(now, now - rhythm.last, (now - rhythm.last) / 2)
    error = now - rhythm.last - rhythm.gap
    return Rhythm(now, rhythm.gap + error / 8, rhythm.deviation + (abs(error) - rhythm.deviation) / 4)


def left(rhythm: Rhythm) -> Rhythm:
    """The rhythm of a replica that has gone: the time it is away is no gap."""
    return replace(rhythm, last=nan)


def grace_ends(quorum_at: float, share: float, rhythms: Mapping[int, Rhythm], missing: Iterable[int]) -> float:
    """When to wait no longer: after the last of the missing that is expected in the window, at most at its end.

    The window is `share` of the replicas' median gap. Who is expected only after it is not waited for at all, so one
    slow or failed replica costs nothing. A gap decides who is waited for; how long takes two deviations more, so that a
    jittery replica is not given up early. A replica never heard of is expected a median gap after the start.

    Args:
        quorum_at: When the quorum was complete.
        share: The window as a share of the median gap. Higher waits for more replicas and makes steps later.
        rhythms: Of all replicas heard of, at least one.
        missing: Those that have not delivered and still may.
    """
    usual = median(r.gap for r in rhythms.values())
    window = quorum_at + share * usual
    unheard = Rhythm(0.0, usual, usual / 2)
    waited_for = [r for r in (rhythms.get(m, unheard) for m in missing) if r.last + r.gap <= window]
    return max((min(r.last + r.gap + 2 * r.deviation, window) for r in waited_for), default=quorum_at)
