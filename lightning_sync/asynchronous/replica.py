"""A replica's side of an asynchronous exchange: what it sends, and what becomes of the progress made meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sync.asynchronous.client import Client, Errand
from lightning_sync.asynchronous.layout import FlatLayout
from lightning_sync.asynchronous.rules.base import Rule


@dataclass
class _Record:
    """The replica's parameters when it had sent `count` contributions, shifted by what it has taken over since."""

    count: int
    vector: Tensor


class Replica:
    r"""Sends deltas and takes over what the owners hold, at the boundaries of steps.

    With m the parameters at the last exchange (the *mark*), x those now, and v what the owners hold once they have
    applied this replica's contributions:

    .. math:: d = m - x, \qquad m \leftarrow x; \qquad
              \text{later:}\quad s = v - m, \quad x \leftarrow x + s, \quad m \leftarrow m + s

    So what was learned while the exchange was under way stays, on top of v, and is in the next delta. Where an owner
    holds contributions back (`Quorum`), s is the difference from the mark of the last one that v contains.

    Belongs to the training thread. Memory: 16 bytes per parameter (mark, delta, the values fetched, one buffer), and 4
    for every contribution that owners hold back.

    Args:
        params: The trained parameters; what they hold now is what all ranks hold.
        layout: Of their vector.
        client: Takes contributions away; its `fetched` is set to what the parameters hold.
        rule: The owners' rule, for where a replica goes on (`Rule.next_local`).

    Attributes:
        clock: Exchanges that all owners have acknowledged.
        sent: Contributions sent.
        steps: Steps since the last exchange began.
    """

    def __init__(self, params: Sequence[Tensor], layout: FlatLayout, client: Client, rule: Rule) -> None:
        self.clock = 0
        self.sent = 0
        self.steps = 0
        self.errand: Errand | None = None
        self.contains: dict[int, int] = {}
        """Per replica, the clock its updates in these parameters reach, for the owner that has least of them."""
        self._params = list(params)
        self._layout = layout
        self._client = client
        self._rule = rule
        device = self._params[0].device if self._params else torch.device("cpu")
        self._delta = layout.zeros(device)
        self._shift = layout.zeros(device)
        self._spare: list[Tensor] = []
        self._device = device
        # A number is not added exactly to a parameter of few bits, so what really changed is looked up.
        self._rounds = any(p.dtype != torch.float32 for p in self._params)
        first = layout.gather(self._params, layout.zeros(device))
        self._records = deque([_Record(0, first)])
        client.fetched.copy_(first)

    @property
    def fetched(self) -> Tensor:
        """What the owners held when they last answered, float32 `[size]`."""
        return self._client.fetched

    @property
    def mark(self) -> Tensor:
        """The parameters at the last exchange, with what was taken over since, float32 `[size]`."""
        return self._records[-1].vector

    def resume(self, clock: int, sent: int) -> None:
        """Go on from parameters that all share, with this clock and this many contributions sent."""
        self.clock, self.sent, self.steps = clock, sent, 0
        vector = self._layout.gather(self._params, self._records[-1].vector)
        self._records = deque([_Record(sent, vector)])
        self._client.fetched.copy_(vector)

    def begin(
        self, *, need: int, samples: float, step: int, gradient: Sequence[Tensor] | None = None, delay: float = 0.0
    ) -> Errand:
        """Send a contribution: the progress since the last, or a gradient.

        Args:
            need: The clock that everybody's updates must have reached in what comes back.
            samples: Samples that went into it.
            step: The step at which this is.
            gradient: Per parameter, in place of the progress.
            delay: Seconds to wait before it leaves; for experiments.
        """
        assert self.errand is None
        mark = self._layout.gather(self._params, self._spare.pop() if self._spare else self._layout.zeros(self._device))
        errand = Errand(
            self._delta, self.sent, self.clock, need, samples=samples, steps=self.steps, step=step, delay=delay
        )
        if self._rule.reads_first:
            errand.pull_first = mark
        elif gradient is not None:
            self._layout.gather(gradient, self._delta)
        else:
            torch.sub(self.mark, mark, out=self._delta)
        self.sent += 1
        self.steps = 0
        self._records.append(_Record(self.sent, mark))
        self.errand = self._client.start(errand)
        return errand

    def meet(self, number: int, step: int) -> Errand:
        """Come to a meeting of all replicas, whose answers are the same bits for all."""
        assert self.errand is None
        self.errand = self._client.start(Errand(clock=self.clock, meeting=number, step=step))
        return self.errand

    @torch.no_grad()
    def take_over(self) -> None:
        """Go on from what an errand has brought, once it is done."""
        errand, self.errand = self.errand, None
        assert errand is not None
        assert errand.done.is_set()
        self._client.check()
        self.clock += errand.meeting is None
        senders = range(len(errand.contains))
        self.contains = {r: min(c.get(r, 0) for c in errand.contains) for r in senders}
        if self._rule.reads_first and errand.meeting is not None:
            return  # reading moves nobody under this rule
        clean = self.steps == 0 and all(count == self.sent for count in errand.sequences)
        for (a, b), count in zip(self._layout.slices, errand.sequences, strict=True):
            base = next(r.vector[a:b] for r in self._records if r.count == count)
            there = self.fetched[a:b]
            if self._rule.reads_first:
                there = self._rule.next_local(base, self._delta[a:b], there)
            torch.sub(there, base, out=self._shift[a:b])
            for record in self._records:
                if record.count == count:
                    record.vector[a:b] = there
                elif record.count > count:
                    record.vector[a:b] += self._shift[a:b]
        if clean:
            self._layout.scatter(self.mark, self._params)
            if self._rounds:
                self._layout.gather(self._params, self.mark)
        else:
            self._move()
        while len(self._records) > 1 and self._records[1].count <= min(errand.sequences):
            self._spare.append(self._records.popleft().vector)

    def _move(self) -> None:
        """Add the shift to the parameters."""
        if not self._rounds:
            self._layout.add(self._shift, self._params)
            return
        before = self._layout.gather(self._params, self._layout.zeros())
        self._layout.add(self._shift, self._params)
        missed = self._layout.gather(self._params, self._layout.zeros()).sub_(before).sub_(self._shift)
        for record in self._records:
            record.vector += missed
