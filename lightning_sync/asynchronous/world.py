"""Asynchronous training in virtual time: the real clocks, rules and shards, moved by events instead of threads.

One heap of events, ordered by time and then by when they were planned, and one generator per replica: the same seed
gives the same run, bit for bit. Owners apply and answer at once; steps and messages take time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from lightning_sync.asynchronous.clocks import Clocks
from lightning_sync.asynchronous.cluster import Cluster, Draws
from lightning_sync.asynchronous.learner import Learner
from lightning_sync.asynchronous.modes import Mode
from lightning_sync.asynchronous.problems import Nothing, Problem
from lightning_sync.asynchronous.rules.base import Contribution
from lightning_sync.asynchronous.shard import Read, Shard
from lightning_sync.checks import check_integer
from lightning_sync.periodic.local_updates import Speed, local_steps


@dataclass(frozen=True)
class Started:
    """A replica starts a step: what a watcher is told.

    Attributes:
        replica: Which.
        seconds: When.
        clock: The number of the update it works on.
        contains: What its copy of each shard contains, see `Read.contains`.
    """

    replica: int
    seconds: float
    clock: int
    contains: list[dict[int, int]]


@dataclass(frozen=True)
class Outcome:
    """What happened.

    Attributes:
        seconds: Virtual time of the run.
        steps: Steps finished, per replica.
        lost: Steps whose result died with a replica, of all.
        waited: Seconds each replica waited for others or for the network.
        goodput: Undisturbed time of the steps that counted, as a share of all replicas' time.
        largest_lead: Of a replica's clock over the slowest one's.
        staleness: Mean staleness in versions, over the shards.
        largest_staleness: The largest.
        versions: The first shard's version at the end.
        values: The consensus at the end, `[n]`: all shards, with everything that was under way.
        loss: The problem's, there.
        curve: (steps of all replicas, loss of the shards) at the wanted intervals.
    """

    seconds: float
    steps: list[int]
    lost: int
    waited: list[float]
    goodput: float
    largest_lead: int
    staleness: float
    largest_staleness: int
    versions: int
    values: Tensor
    loss: float
    curve: list[tuple[int, float]] = field(default_factory=list)


class World:
    """One run.

    Args:
        cluster: How long things take.
        mode: How replicas exchange.
        seed: Of everything random.
        owners: Shards, each with its own messages.
        problem: What is learned; None: nothing, only time passes.
        lr: The replicas' learning rate (plain SGD).
        momentum: Its momentum.
        watch: Is told of every step that starts.
    """

    def __init__(
        self,
        cluster: Cluster,
        mode: Mode,
        *,
        seed: int = 0,
        owners: int = 1,
        problem: Problem | None = None,
        lr: float = 0.1,
        momentum: float = 0.0,
        watch: Callable[[Started], None] | None = None,
    ) -> None:
        check_integer("World", 1, owners=owners)
        self._cluster, self._mode, self._watch = cluster, mode, watch
        self._problem = problem or Nothing(owners)
        self._draws, self._clocks = Draws(cluster, seed), Clocks(cluster.replicas)
        start = self._problem.start()
        bounds = [len(start) * k // owners for k in range(owners + 1)]
        self._parts = list(pairwise(bounds))
        self._shards = [
            Shard(start[a:b].clone(), mode.rule, replicas=cluster.replicas, push=mode.push, optimizer=mode.optimizer)
            for a, b in self._parts
        ]
        self._replicas = [
            Learner(
                r, start.clone(), self._parts, mode.push, lr, momentum, torch.Generator().manual_seed(seed * 65_537 + r)
            )
            for r in range(cluster.replicas)
        ]
        # Per replica: its period, its speed, and the seconds of its steps since its last exchange.
        self._every, self._spent = [mode.sync_every] * cluster.replicas, [0.0] * cluster.replicas
        self._speeds = [Speed(mode.sync_every) for _ in self._replicas]
        # Per owner: who waits for values that contain what: its own contributions up to a number, updates of others.
        self._parked: list[dict[int, tuple[int, dict[int, int]]]] = [{} for _ in self._shards]
        self._events: list[tuple[float, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        self._channels: dict[tuple[int, int, str], float] = {}
        self._planned = self._done = 0
        self._ticks: dict[int, float] = {}
        self._now = 0.0
        self._ended = False
        self._largest_lead = 0

    def run(self, *, seconds: float = inf, steps: float = inf, every: int = 0) -> Outcome:
        """Go on until a time or a number of steps of all replicas together, then deliver what is under way.

        Args:
            seconds: Virtual seconds.
            steps: Steps of all replicas.
            every: Note the loss of the shards every so many steps; 0: never.

        Raises:
            ValueError: if there is no end.
            RuntimeError: if everybody waits for ever.
        """
        if seconds == inf and steps == inf:
            raise ValueError("World.run(seconds=inf, steps=inf): give one of them an end.")
        curve: list[tuple[int, float]] = []
        for shard in self._shards:
            shard.begin(self._now)
        for replica in self._replicas:
            for owner, shard in enumerate(self._shards):
                replica.merge(owner, shard.read(replica.number))
            self._plan(self._draws.failure(replica.number), self._fail, replica)
        for replica in self._replicas:
            self._try_start(replica)
        noted, idle, patience = 0, 0, 1000 * len(self._replicas) * len(self._shards)
        while self._done < steps:
            done, idle = self._done, idle + 1
            if not self._events or idle > patience:  # failures and returns go on even where nobody steps
                raise RuntimeError(f"Nothing more will happen after {self._now} s: all replicas wait.")
            when, _, _, action, arguments = heapq.heappop(self._events)
            if when > seconds:
                self._now = seconds
                break
            self._now = when
            action(*arguments)
            idle = idle if self._done == done else 0
            if every and self._done // every > noted:
                noted = self._done // every
                curve.append((self._done, self._problem.loss(self._values())))
        end = self._now
        self._deliver()
        return self._outcome(end, curve)

    # -- replicas ------------------------------------------------------------------------------------------------

    def _try_start(self, replica: Learner) -> None:
        if not replica.alive or replica.busy or self._ended:
            return
        if not self._may_start(replica):
            if replica.waiting_since is None:
                replica.waiting_since = self._now
            return
        replica.stop_waiting(self._now)
        replica.busy = True
        number = replica.number
        if self._watch is not None:
            clock = self._clocks[number] + replica.unacknowledged
            self._watch(Started(number, self._now, clock, [dict(c) for c in replica.contains]))
        seconds = self._draws.step(number)
        self._spent[number] += seconds
        self._plan(self._now + seconds, self._finish, replica, replica.attempt)

    def _may_start(self, replica: Learner) -> bool:
        bound, number, ahead = self._mode.max_staleness, replica.number, replica.unacknowledged
        if not self._clocks.may_start(number, bound, ahead):
            return False
        needed = self._clocks.needed(number, bound, ahead)
        stale = [k for k, c in enumerate(replica.contains) if self._clocks.missing(number, bound, c, ahead)]
        for owner in stale:
            if owner not in replica.asked:
                replica.asked.add(owner)
                self._send(replica, owner, 0.0, self._ask, replica, owner, replica.life, 0, needed)
        blocked = replica.returning or self._mode.blocking
        return not stale and not (blocked and replica.awaiting)

    def _finish(self, replica: Learner, attempt: int) -> None:
        if attempt != replica.attempt:
            return
        replica.busy = False
        replica.step(self._problem)
        self._done += 1
        for owner, read in replica.inbox.items():
            self._take(replica, owner, read)
        replica.inbox.clear()
        if replica.since_push >= self._every[replica.number]:
            self._push(replica)
        self._try_start(replica)

    def _push(self, replica: Learner) -> None:
        number = replica.number
        clock = self._clocks[number] + replica.unacknowledged
        weight, samples = self._mode.weight_of(self._cluster.replicas), replica.since_push * self._problem.batch
        for owner in range(len(self._shards)):
            delta, sequence = replica.take_progress(owner)
            sent = Contribution(
                number, sequence, delta, replica.versions[owner], clock, weight, samples, replica.since_push
            )
            self._send(replica, owner, 1.0, self._arrive, replica, owner, sent, replica.life)
        if self._mode.local_updates == "dynamic":
            self._adapt(number, replica.since_push)
        replica.pushed(clock)
        self._largest_lead = max(self._largest_lead, clock + 1 - self._clocks.least())

    def _adapt(self, number: int, steps: int) -> None:
        self._speeds[number].add(self._spent[number], steps)
        self._spent[number] = 0.0
        seconds = [speed.seconds for speed in self._speeds]
        if all(seconds):
            self._every[number] = local_steps(self._mode.sync_every, seconds, number)

    def _fail(self, replica: Learner) -> None:
        if self._ended:
            return
        replica.fail(self._now, forget=self._mode.failed == "leave")
        if self._mode.failed == "leave":
            self._spent[replica.number] = 0.0
            self._clocks.retire(replica.number)
            for owner, shard in enumerate(self._shards):
                shard.retire(replica.number)
                self._parked[owner].pop(replica.number, None)
                self._settle(owner)
            self._wake()
        self._plan(self._now + self._cluster.down_seconds, self._return, replica)

    def _return(self, replica: Learner) -> None:
        number = replica.number
        replica.alive = True
        self._plan(self._now + self._draws.failure(number), self._fail, replica)
        if self._mode.failed == "leave":
            self._clocks.rejoin(number, at_least=replica.next_clock)
            replica.restart([shard.rejoin(number) for shard in self._shards])
            for owner in range(len(self._shards)):
                self._send(replica, owner, 0.0, self._ask, replica, owner, replica.life, 0, {})
        self._try_start(replica)

    def _wake(self) -> None:
        for replica in self._replicas:
            if replica.waiting_since is not None:
                self._try_start(replica)

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, replica: Learner, owner: int, share: float, action: Callable[..., None], *arguments: Any) -> None:
        """To an owner; a replica's interface sends its parts one after the other."""
        parts = len(self._shards)
        seconds = self._draws.message(replica.number, share * (owner + 1) / parts)
        self._on_channel((replica.number, owner, "to"), seconds, action, *arguments)

    def _reply(self, replica: Learner, owner: int, share: float, action: Callable[..., None], *arguments: Any) -> None:
        seconds = self._draws.message(replica.number, share / len(self._shards))
        self._on_channel((replica.number, owner, "from"), seconds, action, *arguments)

    def _on_channel(self, channel: tuple[int, int, str], seconds: float, action: Callable[..., None], *a: Any) -> None:
        when = max(self._now + seconds, self._channels.get(channel, 0.0))
        self._channels[channel] = when
        self._plan(when, action, *a, message=True)

    def _arrive(self, replica: Learner, owner: int, sent: Contribution, life: int) -> None:
        if life != replica.life:
            if owner == 0:  # the connection closed with the sender
                replica.lost += sent.steps
            return
        self._shards[owner].apply(sent, self._now)
        self._reply(replica, owner, 0.0, self._acknowledge, replica, owner, life)
        self._park(replica, owner, sent.sequence + 1, {})
        self._settle(owner)

    def _ask(self, replica: Learner, owner: int, life: int, sequence: int, needed: dict[int, int]) -> None:
        if life == replica.life:
            self._park(replica, owner, sequence, needed)
            self._settle(owner)

    def _acknowledge(self, replica: Learner, owner: int, life: int) -> None:
        if life == replica.life and replica.acknowledge(owner):
            self._clocks.advance(replica.number)
            self._wake()
            self._try_start(replica)

    def _answer(self, replica: Learner, owner: int, read: Read, life: int) -> None:
        if life != replica.life:
            return
        if replica.busy:
            replica.inbox[owner] = read
        else:
            self._take(replica, owner, read)
            self._try_start(replica)

    def _take(self, replica: Learner, owner: int, read: Read) -> None:
        replica.asked.discard(owner)
        replica.merge(owner, read)

    # -- owners --------------------------------------------------------------------------------------------------

    def _park(self, replica: Learner, owner: int, sequence: int, needed: dict[int, int]) -> None:
        """Hold a replica's wish for values until the shard can grant it; a later wish includes the earlier one."""
        before, others = self._parked[owner].get(replica.number, (0, {}))
        union = {r: max(others.get(r, 0), needed.get(r, 0)) for r in others.keys() | needed.keys()}
        self._parked[owner][replica.number] = max(before, sequence), union

    def _settle(self, owner: int) -> None:
        """Answer whom the shard can answer, and plan what time alone will make due."""
        shard, parked = self._shards[owner], self._parked[owner]
        for number in sorted(parked):
            sequence, needed = parked[number]
            granted = shard.sequences.get(number, 0) >= sequence
            if granted and all(shard.contains.get(r, 0) >= least for r, least in needed.items()):
                del parked[number]
                replica = self._replicas[number]
                self._reply(replica, owner, 1.0, self._answer, replica, owner, shard.read(number), replica.life)
        due = shard.due()
        if due is not None and due != self._ticks.get(owner):
            self._ticks[owner] = due
            self._plan(max(due, self._now), self._tick, owner)

    def _tick(self, owner: int) -> None:
        self._ticks.pop(owner, None)
        self._shards[owner].tick(self._now)
        self._settle(owner)

    # -- time ----------------------------------------------------------------------------------------------------

    def _plan(self, when: float, action: Callable[..., None], *arguments: Any, message: bool = False) -> None:
        if when < inf:
            self._planned += 1
            heapq.heappush(self._events, (when, self._planned, message, action, arguments))

    def _deliver(self) -> None:
        """A quiet point: the living send what they have, everything under way arrives, rules hold nothing back."""
        self._ended = True
        for replica in self._replicas:
            if replica.since_push:  # in a dead one that lost its memory this is 0
                self._push(replica)
        while self._events:
            when, _, message, action, arguments = heapq.heappop(self._events)
            if message:
                self._now = when
                action(*arguments)
        for shard in self._shards:
            shard.flush()

    def _values(self) -> Tensor:
        return torch.cat([shard.values for shard in self._shards])

    def _outcome(self, end: float, curve: list[tuple[int, float]]) -> Outcome:
        replicas, values = self._replicas, self._values()
        for replica in replicas:
            replica.stop_waiting(end)
        good = sum((r.steps - r.lost) * self._cluster.undisturbed(r.number) for r in replicas)
        staleness = [shard.ledger.staleness() for shard in self._shards]
        return Outcome(
            seconds=end,
            steps=[r.steps for r in replicas],
            lost=sum(r.lost for r in replicas),
            waited=[r.waited for r in replicas],
            goodput=good / (len(replicas) * end) if end else 0.0,
            largest_lead=self._largest_lead,
            staleness=sum(s.mean for s in staleness) / len(staleness),
            largest_staleness=max(s.largest for s in staleness),
            versions=self._shards[0].version,
            values=values,
            loss=self._problem.loss(values),
            curve=curve,
        )
