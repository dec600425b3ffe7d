"""Which mode to use: predictions for a list of candidates, and the first of them that is fast enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_sync.compressors import Compressor, PowerSGD
from lightning_sync.planner import predict
from lightning_sync.planner.predict import Compute, Link, Traffic

FAST_ENOUGH = 1.1
_MIB = 2**20


@dataclass(frozen=True)
class Candidate:
    """A mode with a compressor.

    Attributes:
        name: As one would write it on the command line.
        mode: ``"strict"``, ``"delayed"``, ``"periodic"`` or ``"asynchronous"``.
        compressor: A name, or a compressor.
        sync_every: Steps between two exchanges.
        overlap_steps: Steps for which an exchange travels while training goes on.
        fragments: Parts of an exchange.
        price: What it costs in learning, in a few words.
    """

    name: str
    mode: str
    compressor: str | Compressor = "none"
    sync_every: int = 1
    overlap_steps: int = 0
    fragments: int = 1
    price: str = "none"


# In the order in which they cost learning or convenience: the first that is fast enough is recommended.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("strict", "strict"),
    Candidate("strict compressor=bf16", "strict", "bf16", price="none seen"),
    Candidate("strict compressor=int8", "strict", "int8", price="none seen"),
    Candidate("delayed compressor=int8", "delayed", "int8", price="gradients one step old"),
    Candidate("strict compressor=powersgd", "strict", PowerSGD(rank=4, warmup_steps=0), price="some: rank 4"),
    Candidate("diloco sync_every=64", "periodic", "none", 64, price="some: replicas drift for 64 steps"),
    Candidate("diloco sync_every=64 compressor=int8", "periodic", "int8", 64, price="as without int8"),
    Candidate(
        "streaming_diloco compressor=int8",
        *("periodic", "int8", 64, 6, 4),
        price="some, and values 6 steps old",
    ),
    Candidate(
        "async sync_every=8 compressor=int8",
        *("asynchronous", "int8", 8),
        price="contributions of changing age: lower rates",
    ),
)


@dataclass(frozen=True)
class Prediction:
    """What a candidate would cost here.

    Attributes:
        candidate: Which.
        traffic: Of one exchange.
        wire_over_compute: Seconds of wire per step over seconds of compute; above 1 no overlap can hide it.
        seconds: Of a step, in the mean.
        slowdown: Those over compute alone.
    """

    candidate: Candidate
    traffic: Traffic
    wire_over_compute: float
    seconds: float
    slowdown: float


def predict_all(
    candidates: Sequence[Candidate],
    traffic_of: Callable[[Candidate], Traffic],
    compute: Compute,
    between: Link,
    within: Link | None,
    total_bytes: int,
    bucket_bytes: int = 25 * _MIB,
) -> list[Prediction]:
    """Predict every candidate.

    Args:
        candidates: Which.
        traffic_of: What one reduction of a candidate sends and costs.
        compute: A step without communication.
        between: The link between nodes.
        within: Inside nodes, with two levels.
        total_bytes: Of all gradients.
        bucket_bytes: Of a bucket in the strict mode.
    """
    found = []
    for candidate in candidates:
        traffic = traffic_of(candidate)
        if candidate.mode == "strict":
            shares = predict.bucket_shares(total_bytes, bucket_bytes)
            seconds = predict.strict(compute, shares, traffic, between, within)
        elif candidate.mode == "delayed":
            seconds = predict.delayed(compute, traffic, between, within)
        elif candidate.mode == "asynchronous":
            seconds = compute.seconds
        else:
            seconds = predict.periodic(
                *(compute, traffic, between, within),
                sync_every=candidate.sync_every,
                overlap_steps=candidate.overlap_steps,
                fragments=candidate.fragments,
            )
        every = float(candidate.sync_every)
        if candidate.mode == "asynchronous":
            every = predict.achieved_period(compute, traffic, between, within, candidate.sync_every)
        wire = traffic.wire_seconds(between, within) / every
        found.append(Prediction(candidate, traffic, wire / compute.seconds, seconds, seconds / compute.seconds))
    return found


def recommend(predictions: Sequence[Prediction], fast_enough: float = FAST_ENOUGH) -> tuple[Prediction, str]:
    """The first prediction that is fast enough, and why.

    Fast enough is at most `fast_enough` times compute, or, where nothing reaches that, `fast_enough` times the fastest.
    Predictions come in the order of what they cost in learning.
    """
    best = min(p.slowdown for p in predictions)
    bound = max(fast_enough, best * fast_enough)
    chosen = next(p for p in predictions if p.slowdown <= bound)
    first = predictions[0]
    if chosen is first:
        return chosen, (
            f"Keep DDP (or strict, which is the same without Lightning's broadcast per batch): synchronising takes "
            f"{100 * (first.slowdown - 1):.0f} % of compute, and every other mode has a price."
        )
    return chosen, (
        f"{chosen.candidate.name}: a step takes {chosen.slowdown:.2f} times compute, with DDP "
        f"{first.slowdown:.2f} times. Its price in learning: {chosen.candidate.price}."
    )
