"""Models to measure with. Their inputs are made up: only their time and their bytes mean something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256
CONTEXT = 64
HEAD_WIDTH = 32


class Block(nn.Module):
    """A causal transformer block, normalised before attention and before the feed-forward part.

    Args:
        width: Size of the hidden state, a multiple of 32.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, HEAD_WIDTH)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_forward(hidden)
        return hidden + fed


class Transformer(nn.Module):
    """A small language model over bytes; with width 256 and 8 layers about 6.5 million parameters, 26 MB."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def stages(self) -> list[nn.Module]:
        """The parts in the order of the forward pass."""
        return [self.embedding, self.position, *self.blocks, self.norm, self.head]


class LanguageModel(LightningModule):
    """`lm`: a transformer that really computes, 2 sequences of 64 bytes a step, AdamW.

    Args:
        width: Size of the hidden state, a multiple of 32.
        layers: Number of blocks.
        compute_ms: Not used; it computes as long as it takes.
    """

    def __init__(self, width: int, layers: int, compute_ms: float) -> None:
        super().__init__()
        self.model = Transformer(width, layers)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _SleepingStage(torch.autograd.Function):
    """Passes its input on; sleeps instead of computing; gives fixed gradients to its parameters."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, seconds: float, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.gradients = gradients
        time.sleep(seconds / 3)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *passed: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds * 2 / 3)
        return passed[0], None, None, *(gradient.clone() for gradient in ctx.gradients)


class EmulatedCompute(LightningModule):
    """`emu`: the transformer's parameters, with sleep in place of compute, SGD.

    A sleeping rank needs no core, so that more ranks than cores each compute as if on a machine of their own, while
    compression, copies and transport remain real work. A third of the time passes in the forward and two thirds in the
    backward pass, shared among the stages by their number of parameters; a stage's gradients arrive when its backward
    part has slept. Gradients are noise, fixed for a rank and other on every rank.

    Args:
        width: Size of the hidden state, a multiple of 32.
        layers: Number of blocks.
        compute_ms: Milliseconds slept per step.
    """

    def __init__(self, width: int, layers: int, compute_ms: float) -> None:
        super().__init__()
        self.model = Transformer(width, layers)
        self.start = nn.Parameter(torch.ones(1))
        self.compute_seconds = compute_ms / 1000
        self._stages: list[tuple[float, list[nn.Parameter]]] = []
        self._noise: list[list[Tensor]] = []
        total = sum(parameter.numel() for parameter in self.model.parameters())
        for stage in self.model.stages():
            parameters = list(stage.parameters())
            share = sum(parameter.numel() for parameter in parameters) / total
            self._stages.append((share * self.compute_seconds, parameters))

    def on_fit_start(self) -> None:
        generator = torch.Generator().manual_seed(100 + self.global_rank)
        self._noise = [
            [1e-3 * torch.randn(parameter.shape, generator=generator) for parameter in parameters]
            for _, parameters in self._stages
        ]

    def training_step(self, _batch: Tensor, _: int) -> Tensor:
        passed = self.start
        for (seconds, parameters), gradients in zip(self._stages, self._noise, strict=True):
            passed = _SleepingStage.apply(  # type: ignore[no-untyped-call]
                passed, seconds, gradients, *parameters
            )
        return passed.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


MODELS: dict[str, Callable[[int, int, float], LightningModule]] = {"emu": EmulatedCompute, "lm": LanguageModel}


class RandomBytes(Dataset[Tensor]):
    """Sequences of random bytes, the same for every call with one seed.

    Args:
        count: Number of sequences.
        seed: Seed of this rank's sequences.
    """

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences = torch.randint(VOCABULARY, (count, CONTEXT + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Tensor:
        return self.sequences[index]


def loader(steps: int, seed: int) -> DataLoader[Tensor]:
    """Batches of 2 sequences for a number of steps."""
    return DataLoader(RandomBytes(2 * steps, seed), batch_size=2)
