"""The modes written out by hand, in plain torch: what the strategies are compared with.

Every function runs on all ranks of a process group that exists, trains a `Toy` on this rank's share of the data and
returns its parameters. Differences are averaged in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.models import Noise, Toy


class Sharded(Toy):
    """A `Toy` that deals its data out itself, so that a loop by hand sees the same batches."""

    def __init__(self, rank: int, world_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.shard = range(rank, 96, world_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(Noise(), list(self.shard)), batch_size=4)


def mean(values: list[Tensor]) -> list[Tensor]:
    """Means over the ranks, in float64."""
    flat = torch.cat([v.detach().double().reshape(-1) for v in values])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return [p.view(v.shape) for p, v in zip(flat.split([v.numel() for v in values]), values, strict=True)]


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def train(
    module: Sharded,
    steps: int,
    after: Callable[[int, list[nn.Parameter]], None],
    gradients: Callable[[int, list[nn.Parameter]], bool] = lambda step, params: True,
    accumulate: int = 1,
) -> dict[str, Tensor]:
    """Train for `steps` steps; `gradients` may change gradients before each (False: no step), `after` parameters."""
    optimizer = module.configure_optimizers()
    params = trained(module)
    done = 0
    while done < steps:
        window = 0
        optimizer.zero_grad()
        batches = list(module.train_dataloader())
        for i, (x, y) in enumerate(batches):
            if done == steps:
                break
            extra = module.alternate and i % 2 == 0
            (nn.functional.mse_loss(module(x, extra), y) / accumulate).backward()
            window += 1
            if window == accumulate or i == len(batches) - 1:
                done += 1
                if gradients(done, params):
                    optimizer.step()
                after(done, params)
                optimizer.zero_grad()
                window = 0
    return {n: p.detach().clone() for n, p in module.named_parameters()}


class Periodic:
    """Local steps, and an outer step every `every` steps and after the last.

    Args:
        outer: Takes anchor and mean delta (float64) and returns the new anchor.
        local_weight: Share of the local value that is kept.
        overlap: The delta is taken so many steps before it is applied.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        every: int,
        steps: int,
        outer: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
        *,
        local_weight: float = 0.0,
        overlap: int = 0,
        pull: float = 0.0,
        warmup: int = 0,
    ) -> None:
        self.anchor = [p.detach().clone().double() for p in params]
        self.every, self.steps, self.outer = every, steps, outer
        self.local_weight, self.overlap, self.pull, self.warmup = local_weight, overlap, pull, warmup
        self.delta: list[Tensor] | None = None

    def gradients(self, step: int, params: list[nn.Parameter]) -> bool:
        if step <= self.warmup:
            held = [p for p in params if p.grad is not None]
            for p, g in zip(held, mean([p.grad for p in held if p.grad is not None]), strict=True):
                p.grad = g.to(p.dtype)
        return True

    @torch.no_grad()
    def after(self, step: int, params: list[nn.Parameter]) -> None:
        t = step - self.warmup
        if t <= 0:
            self.anchor = [p.detach().clone().double() for p in params]
            return
        if (t + self.overlap) % self.every == 0:
            self.start(params)
        if t % self.every == 0:
            self.finish(params, self.local_weight)
        if step == self.steps and (t % self.every or self.local_weight or self.overlap or self.pull):
            if self.delta is not None:
                self.finish(params, self.local_weight)
            self.start(params)
            self.finish(params, 0.0, last=True)

    def start(self, params: list[nn.Parameter]) -> None:
        self.delta = mean([a - p for a, p in zip(self.anchor, params, strict=True)])
        for a, p in zip(self.anchor, params, strict=True):
            p += self.pull * (a - p)

    def finish(self, params: list[nn.Parameter], weight: float, *, last: bool = False) -> None:
        assert self.delta is not None
        self.anchor, self.delta = self.outer(self.anchor, self.delta), None
        for a, p in zip(self.anchor, params, strict=True):
            if last or not self.pull:
                p.copy_(weight * p + (1 - weight) * a)


def averaging(anchor: list[Tensor], delta: list[Tensor]) -> list[Tensor]:
    return [a - d for a, d in zip(anchor, delta, strict=True)]


class NesterovByHand:
    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.m: list[Tensor] = []

    def __call__(self, anchor: list[Tensor], delta: list[Tensor]) -> list[Tensor]:
        self.m = self.m or [torch.zeros_like(d) for d in delta]
        self.m = [self.momentum * m + d for m, d in zip(self.m, delta, strict=True)]
        step = [d + self.momentum * m for d, m in zip(delta, self.m, strict=True)]
        return [a - self.lr * s for a, s in zip(anchor, step, strict=True)]


class SlowMoByHand:
    def __init__(self, alpha: float, beta: float, gamma: float) -> None:
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self.u: list[Tensor] = []

    def __call__(self, anchor: list[Tensor], delta: list[Tensor]) -> list[Tensor]:
        self.u = self.u or [torch.zeros_like(d) for d in delta]
        self.u = [self.beta * u + d / self.gamma for u, d in zip(self.u, delta, strict=True)]
        return [a - self.alpha * self.gamma * u for a, u in zip(anchor, self.u, strict=True)]


class Shifted:
    """Averaged gradients, applied `delay` steps late."""

    def __init__(self, delay: int = 1, compensation: float = 0.0) -> None:
        self.delay, self.compensation = delay, compensation
        self.queue: list[tuple[list[Tensor | None], list[Tensor]]] = []

    def gradients(self, step: int, params: list[nn.Parameter]) -> bool:
        world = dist.get_world_size()
        used = torch.tensor([p.grad is not None for p in params], dtype=torch.int32)
        dist.all_reduce(used)
        local = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
        averaged = mean(local)
        assert world > 0
        now = [g if n else None for g, n in zip(averaged, used.tolist(), strict=True)]
        self.queue.append((now, [p.detach().clone().double() for p in params]))
        for p in params:
            p.grad = None
        if len(self.queue) <= self.delay:
            return False
        late, then = self.queue.pop(0)
        for p, g, w in zip(params, late, then, strict=True):
            if g is not None:
                p.grad = (g + self.compensation * g * g * (p.detach().double() - w)).to(p.dtype)
        return True
