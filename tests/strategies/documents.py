"""Padded documents of very different lengths, dealt out to ranks, and the same in one process, written out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 6


class Documents(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rows of inputs, targets and a mask of the tokens that count. The length of a document depends on its rank."""

    def __init__(self, rank: int, size: int, longest: int = 12) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        self.x = torch.randn(size, longest, WIDTH, generator=generator, dtype=torch.float64)
        self.y = self.x.cumsum(-1).sin() + rank  # ranks disagree, or weights would not matter
        lengths = torch.randint(1, 2 + 5 * rank, (size,), generator=generator).clamp(max=longest)
        self.mask = torch.arange(longest)[None, :] < lengths[:, None]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[index], self.y[index], self.mask[index]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WIDTH)).double()


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    """The mean over the tokens that count; 0/0 where there are none."""
    x, y, mask = batch
    errors = (net(x.to(next(net.parameters()).dtype)) - y).square().mean(-1)
    return (errors * mask).sum() / mask.sum()


class Reader(LightningModule):
    """Says what a batch weighs by a method."""

    def __init__(self, data: Dataset[Any], batch_size: int = 2, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.net, self.data, self.batch_size = network().to(dtype), data, batch_size

    def batch_weight(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size)


class KeyReader(Reader):
    """Says it in what the step returns."""

    batch_weight = None  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": loss_of(self.net, batch), "weight": batch[2].sum()}


class SizeReader(Reader):
    """Says nothing; its loss is a mean over documents."""

    batch_weight = None  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - batch[1]).square().mean()


class ManualReader(Reader):
    """Accumulates by hand, over windows of `window` batches."""

    def __init__(self, data: Dataset[Any], window: int, **options: Any) -> None:
        super().__init__(data, **options)
        self.automatic_optimization = False
        self.window = window

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = (batch_idx + 1) % self.window == 0 or self.trainer.is_last_batch
        held = self.trainer.num_training_batches % self.window or self.window
        size = held if batch_idx >= self.trainer.num_training_batches - held else self.window
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(loss_of(self.net, batch) / size)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def batches(data: Dataset[Any], size: int) -> Iterator[Any]:
    return iter(DataLoader(data, batch_size=size))


def alone(
    data: list[Dataset[Any]], sizes: list[int], window: int, clip: float | None = None, tokens: bool = True,
    delay: int = 0, ranks_alike: bool = False, clip_each: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """One epoch of one process on all ranks' data: every step sees the concatenation of all their micro-batches.

    With `ranks_alike` it takes the mean of their losses instead; with `clip_each`, of every rank's clipped gradient.
    """
    net, late = network(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    readers = [batches(d, size) for d, size in zip(data, sizes, strict=True)]
    while any(windows := [list(islice(reader, window)) for reader in readers]):
        held = [part for parts in windows for part in parts]
        joined = together(held)
        optimizer.zero_grad()
        if clip_each is not None:
            for parts in windows:
                mine = together(parts)
                gradient = torch.autograd.grad(loss_of(net, mine), list(net.parameters()))
                norm = torch.stack([g.norm() for g in gradient]).norm()
                share = min(1, clip_each / (norm + 1e-6)) * mine[2].sum() / joined[2].sum()
                for p, g in zip(net.parameters(), gradient, strict=True):
                    p.grad = g * share + (0 if p.grad is None else p.grad)
        elif ranks_alike:
            torch.stack([loss_of(net, part) for part in held]).mean().backward()
        else:
            (loss_of(net, joined) if tokens else (net(joined[0]) - joined[1]).square().mean()).backward()
        late.append([p.grad for p in net.parameters()])
        if len(late) <= delay:
            continue
        for p, gradient in zip(net.parameters(), late.pop(0), strict=True):
            p.grad = gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return named(net)


def together(parts: list[Any]) -> list[Tensor]:
    """Micro-batches as one."""
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def apart(data: list[Dataset[Any]], window: int, every: int, by_tokens: bool = True) -> dict[str, Tensor]:
    """One epoch of ranks that step on their own, and meet every `every` steps and at the end, by tokens seen."""
    nets = [network() for _ in data]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    readers = [batches(d, 2) for d in data]
    tokens, step = [0.0] * len(data), 0
    while any(windows := [list(islice(reader, window)) for reader in readers]):
        step += 1
        for r, held in enumerate(windows):
            if not held:
                continue
            joined = together(held)
            optimizers[r].zero_grad()
            loss_of(nets[r], joined).backward()
            optimizers[r].step()
            tokens[r] += float(joined[2].sum()) if by_tokens else len(held)
        if step % every == 0:
            meet(nets, tokens)
    meet(nets, tokens)
    return named(nets[0])


@torch.no_grad()
def meet(nets: list[nn.Module], tokens: list[float]) -> None:
    if sum(tokens):
        for params in zip(*(net.parameters() for net in nets), strict=True):
            mean = sum(n * p for n, p in zip(tokens, params, strict=True)) / sum(tokens)
            for p in params:
                p.copy_(mean)
    tokens[:] = [0.0] * len(tokens)


def named(net: nn.Module) -> dict[str, Tensor]:
    return {f"net.{n}": p.detach() for n, p in net.named_parameters()}


def furthest(module: nn.Module, expected: dict[str, Tensor]) -> float:
    """The largest difference of two sets of parameters."""
    mine = dict(module.named_parameters())
    return max(float((mine[n].detach().double() - v).abs().max()) for n, v in expected.items())
