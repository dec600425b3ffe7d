r"""From the times of the parts to the time of a step, by mode.

A reduction of all gradients takes :math:`X = w + e`: :math:`w` for its bytes, :math:`e` for encoding, the owners' work
and decoding. With compute :math:`C`, all per step and in seconds, what a step takes is

==========================================  ==================================================================
strict, buckets ready during backward       the end of a queue, `strict`; from :math:`C` (all hidden) to :math:`C + X`
delayed by one step                         :math:`\max(C, X)`
period H, overlapped for tau steps          :math:`C + \max(0, X - \tau C) / H`
F parts, each overlapped for tau steps      :math:`C + F \max(0, X / F - \tau C) / H`
asynchronous                                :math:`C`, with an exchange every :math:`\max(H, X / C)` steps
==========================================  ==================================================================

What the formulas leave out: codecs that compete with the model for one processor, ranks that wait for a slow one, and
traffic of others on the same links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """One step of one rank without communication, in seconds.

    Attributes:
        forward: Loading, forward pass and everything that is in no other part.
        backward: Backward pass; gradients become ready evenly during it.
        optimizer: Clipping and the optimiser's step.
    """

    forward: float
    backward: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """All of it, C."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Link:
    """What one node's interface does, in one direction, while all nodes use theirs.

    Attributes:
        bytes_per_second: Measured by all-reduces of some megabytes.
        round_seconds: An all-reduce of a few bytes.
    """

    bytes_per_second: float
    round_seconds: float


@dataclass(frozen=True)
class Traffic:
    """One reduction of all gradients (or differences) with one compressor.

    Attributes:
        interface_bytes: Through a node's interface, all its ranks together.
        local_bytes: Sent by one rank inside its node.
        rounds: Collectives that wait for each other.
        codec_seconds: Encoding, an owner's work and decoding, on one rank.
    """

    interface_bytes: float
    local_bytes: float
    rounds: int
    codec_seconds: float

    def wire_seconds(self, between: Link, within: Link | None) -> float:
        """w: bytes over rates, without the rounds' latency."""
        inside = self.local_bytes / within.bytes_per_second if within is not None else 0.0
        return self.interface_bytes / between.bytes_per_second + inside

    def seconds(self, between: Link, within: Link | None) -> float:
        """X = w + e, with the latency of every round."""
        return self.wire_seconds(between, within) + self.codec_seconds + self.rounds * between.round_seconds


def strict(compute: Compute, shares: Sequence[float], traffic: Traffic, between: Link, within: Link | None) -> float:
    """A step in which every bucket is reduced as soon as its gradients are there, one bucket after the other.

    Bucket i holds the share :math:`s_i` of all gradients. It is ready at :math:`r_i = F + B (s_1 + ... + s_i)` and
    done at :math:`d_i = max(d_{i-1}, r_i) + s_i (w + e) + rounds * latency`; the step ends at
    :math:`max(F + B, d_n) + O`.

    Args:
        compute: F, B and O.
        shares: :math:`s_i`, in the order in which buckets become ready; they add up to 1.
        traffic: Of one reduction.
        between: The link between nodes (inside the node, if there is only one).
        within: The link inside a node, for reductions of two levels.
    """
    latency = traffic.rounds * between.round_seconds
    whole = traffic.wire_seconds(between, within) + traffic.codec_seconds
    ready = done = compute.forward
    for share in shares:
        ready += share * compute.backward
        done = max(done, ready) + share * whole + latency
    return max(compute.forward + compute.backward, done) + compute.optimizer


def delayed(compute: Compute, traffic: Traffic, between: Link, within: Link | None) -> float:
    """A step whose gradients travel during the next one: max(C, X)."""
    return max(compute.seconds, traffic.seconds(between, within))


def periodic(
    compute: Compute,
    traffic: Traffic,
    between: Link,
    within: Link | None,
    *,
    sync_every: int,
    overlap_steps: int = 0,
    fragments: int = 1,
) -> float:
    """The mean step of replicas that exchange every H steps: C + F max(0, X / F - tau C) / H.

    Some of a part is encoded while another travels, so that X is the longer of the two and, of the shorter, one of
    three pieces that are under way at a time.
    """
    wire = traffic.wire_seconds(between, within) + traffic.rounds * between.round_seconds
    codec = traffic.codec_seconds
    each = (max(wire, codec) + min(wire, codec) / 3) / fragments
    return compute.seconds + fragments * max(0.0, each - overlap_steps * compute.seconds) / sync_every


def achieved_period(compute: Compute, traffic: Traffic, between: Link, within: Link | None, sync_every: int) -> float:
    """Steps between two exchanges that nobody waits for: one begins when the one before is over, max(H, X / C)."""
    return max(float(sync_every), traffic.seconds(between, within) / compute.seconds)


def bucket_shares(total_bytes: int, bucket_bytes: int, first_bytes: int = 2**20) -> list[float]:
    """How DDP cuts gradients after its first step: a small bucket that is ready early, then full ones.

    Args:
        total_bytes: Of all gradients.
        bucket_bytes: Of a bucket (`bucket_cap_mb`).
        first_bytes: Of the first.
    """
    sizes, left = [min(first_bytes, bucket_bytes, total_bytes)], total_bytes
    left -= sizes[0]
    while left > 0:
        sizes.append(min(bucket_bytes, left))
        left -= sizes[-1]
    return [size / total_bytes for size in sizes]
