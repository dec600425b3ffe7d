"""A cluster that exists on paper: how long steps and messages take, who stalls, who fails."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

from lightning_sync.checks import check_integer, check_positive, check_share


@dataclass(frozen=True)
class Cluster:
    """What the simulated world draws from.

    Args:
        replicas: How many.
        step_seconds: Time of an undisturbed step.
        speeds: How many times longer a step of each replica takes, for good; empty: all alike.
        jitter: Standard deviation of the logarithm of a step's time; 0.1 is about 10 %.
        stall_share: Share of a replica's steps that stall, independently of the others.
        stall_factor: How many times longer a stalled step takes.
        latency: Seconds one way.
        link_jitter: Mean of an exponentially distributed further delay of every message, in seconds. Messages between
            two parties never overtake each other.
        bandwidth: Bytes per second of a replica's network interface, in each direction. Owners' interfaces are not
            modelled.
        model_bytes: Bytes of all shards together, once on the wire.
        failure_every: Mean seconds from a replica's start, or return, to its failure (exponentially distributed); None:
            nobody fails.
        down_seconds: How long a failed replica is away.
    """

    replicas: int = 4
    step_seconds: float = 1.0
    speeds: tuple[float, ...] = ()
    jitter: float = 0.0
    stall_share: float = 0.0
    stall_factor: float = 12.0
    latency: float = 0.0
    link_jitter: float = 0.0
    bandwidth: float = inf
    model_bytes: float = 0.0
    failure_every: float | None = None
    down_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_integer("Cluster", 1, replicas=self.replicas)
        check_positive("Cluster", step_seconds=self.step_seconds, bandwidth=self.bandwidth)
        check_positive("Cluster", stall_factor=self.stall_factor, failure_every=self.failure_every)
        check_share("Cluster", stall_share=self.stall_share)
        for name in ("jitter", "latency", "link_jitter", "model_bytes", "down_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"Cluster({name}={value!r}): expected a number of at least 0.")
        if self.speeds and len(self.speeds) != self.replicas:
            raise ValueError(
                f"Cluster(speeds={self.speeds!r}): expected one factor for each of {self.replicas} replicas, or none."
            )
        check_positive("Cluster", **{f"speeds[{r}]": s for r, s in enumerate(self.speeds)})

    def undisturbed(self, replica: int) -> float:
        """Seconds of a step of this replica without jitter and stalls."""
        return self.step_seconds * (self.speeds[replica] if self.speeds else 1.0)


class Draws:
    """The random part. Every replica has streams of its own, so what happens to it does not depend on the mode.

    Args:
        cluster: What to draw from.
        seed: The same seed gives the same world, bit for bit.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._steps, self._failures, self._links = (
            [Random(f"{kind} {seed} {r}") for r in range(cluster.replicas)] for kind in ("step", "failure", "link")
        )

    def step(self, replica: int) -> float:
        """Seconds of the replica's next step."""
        cluster, random = self._cluster, self._steps[replica]
        # Both are drawn whatever the options are, so that options can be compared on the same draws.
        noise, stalls = random.gauss(0.0, 1.0), random.random() < cluster.stall_share
        seconds = cluster.undisturbed(replica) * (cluster.stall_factor if stalls else 1.0)
        return seconds * float(2.718281828459045 ** (cluster.jitter * noise))

    def failure(self, replica: int) -> float:
        """Seconds until the replica fails."""
        every = self._cluster.failure_every
        return inf if every is None else self._failures[replica].expovariate(1 / every)

    def message(self, replica: int, share: float) -> float:
        """Seconds until a message to or from the replica is there, which carries this share of the model."""
        cluster = self._cluster
        extra = self._links[replica].expovariate(1 / cluster.link_jitter) if cluster.link_jitter else 0.0
        return cluster.latency + share * cluster.model_bytes / cluster.bandwidth + extra
