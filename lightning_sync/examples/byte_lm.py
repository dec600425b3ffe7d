"""A small causal transformer over bytes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sync.examples.checks import check_integers, check_number

_VALUES = 256


class Block(nn.Module):
    """Pre-norm attention and feed-forward layers, each with a residual connection.

    Args:
        width: Features per position.
        heads: Attention heads; must divide ``width``.
        dropout: Share of features dropped on each branch in training.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, width)`` to the same shape; position ``i`` sees positions up to ``i``."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_mlp(x)))
        return out


class ByteLM(LightningModule):
    """Predicts the next byte. About one million parameters with the default sizes.

    Trains with AdamW, a linear warm-up and a cosine down to ``final_lr * lr`` over the steps that the trainer expects.
    Logs ``train_loss`` and ``val_loss`` in nats per byte.

    Args:
        width: Features per position.
        depth: Transformer blocks.
        heads: Attention heads; must divide ``width``.
        context: Longest sequence, in bytes.
        dropout: Share of features dropped in training, in [0, 1).
        lr: Highest learning rate.
        weight_decay: AdamW's; applied to matrices only.
        warmup: Share of all steps over which the rate rises, in [0, 1).
        final_lr: Share of ``lr`` that is left at the last step, in [0, 1].

    Raises:
        ValueError: If ``heads`` does not divide ``width``, or an argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 5,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup: float = 0.05,
        final_lr: float = 0.1,
    ) -> None:
        super().__init__()
        check_integers(1, {"width": width, "depth": depth, "heads": heads, "context": context})
        if width % heads:
            raise ValueError(f"heads={heads} must divide width={width}.")
        check_number("dropout", dropout, 0, 1)
        check_number("lr", lr, 0, open_low=True)
        check_number("weight_decay", weight_decay, 0)
        check_number("warmup", warmup, 0, 1)
        check_number("final_lr", final_lr, 0)
        if final_lr > 1:
            raise ValueError(f"final_lr={final_lr} must lie in [0, 1]: it is a share of lr.")
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.final_lr = final_lr
        self.token = nn.Embedding(_VALUES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VALUES, bias=False)
        self.apply(_initialise)
        for name, parameter in self.blocks.named_parameters():  # what is added 2 * depth times is scaled down (GPT-2)
            if name.endswith(("project.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map byte values ``(batch, length)`` to logits ``(batch, length, 256)`` of each next byte."""
        positions = torch.arange(x.shape[1], device=x.device)
        hidden = self.blocks(self.token(x) + self.position(positions))
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean loss over all positions of the batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss, averaged over the ranks at the end of the epoch."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW; the rate is set anew after every step."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), weight_decay=self.weight_decay)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def _rate(self, step: int, total: float) -> float:
        """Share of ``lr`` at a step; without a known total the rate stays up after the warm-up."""
        if math.isinf(total):
            return 1.0
        rise = max(1, round(self.warmup * total))
        if step < rise:
            return (step + 1) / rise
        done = min(1.0, (step - rise) / max(1, total - rise))
        return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * done))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
