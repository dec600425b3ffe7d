#!/usr/bin/env python3
"""What a mean of means gets wrong: the byte model on padded documents, whose lengths differ by rank and batch.

    python recipes/weights.py                        # 4 ranks, 400 steps: about an hour on 2 cores
    python recipes/weights.py --steps 30 --width 16 --depth 1 --length 32 --seeds 0   # a minute

Documents are functions and other blocks of the standard library's source, cut at blank lines: many are short. They are
sorted by length and dealt out in stretches, as shards of a corpus are, so that ranks hold documents of different
lengths; batches are padded to the longest, and padding does not count. The loss of a batch is the mean over its bytes.
For every seed three runs from the same start, over the same batches: one process on the concatenation of all ranks'
batches, which is right by definition, `aggregator="weighted_mean"`, and `aggregator="mean"`. The table shows how far
the parameters are from those of the one process after the first step and in the end, relative to how far these have
moved (Euclidean norms), and the loss per byte on documents of all lengths.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

import lightning_sync as ls
from lightning_sync.examples.byte_lm import ByteLM
from lightning_sync.examples.python_source import read_split

IGNORED = -100


class PaddedByteLM(ByteLM):
    """The byte model, with a loss over the bytes that are no padding, and their number as the batch's weight."""

    after_first: Tensor | None = None

    def batch_weight(self, batch: Tensor) -> Tensor:
        return (batch[:, 1:] >= 0).sum()

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1].clamp(min=0)).flatten(0, 1)
        return F.cross_entropy(logits, batch[:, 1:].flatten(), ignore_index=IGNORED)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.after_first is None:
            self.after_first = flat(self)

    def configure_optimizers(self) -> Any:
        # AdamW hides how long a gradient is; SGD shows all of it.
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Dealt(Sampler[list[int]]):
    """The batches of some of the ranks together: each draws from its own stretch of the sorted documents."""

    def __init__(self, documents: int, ranks: range, world_size: int, batch_size: int, steps: int, seed: int) -> None:
        self.stretch, self.ranks = documents // world_size, ranks
        self.batch_size, self.steps, self.seed = batch_size, steps, seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            batch: list[int] = []
            for rank in self.ranks:
                generator = torch.Generator().manual_seed((self.seed * 100_003 + step) * 101 + rank)
                drawn = torch.randint(self.stretch, (self.batch_size,), generator=generator)
                batch += (rank * self.stretch + drawn).tolist()
            yield batch


def read_documents(length: int) -> list[Tensor]:
    """Blocks between blank lines, at least 8 bytes, cut to `length` + 1, the shortest first."""
    text = bytes(read_split(0)[0].numpy())
    blocks = [
        torch.frombuffer(bytearray(b[: length + 1]), dtype=torch.uint8) for b in text.split(b"\n\n") if len(b) > 8
    ]
    return sorted(blocks, key=len)


def padded(parts: list[Tensor]) -> Tensor:
    rows = torch.full((len(parts), max(map(len, parts))), IGNORED, dtype=torch.int64)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part.long()
    return rows


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])


def train(options: argparse.Namespace, seed: int, aggregator: str | None) -> None:
    """One run on this rank (`aggregator` None: one process for all ranks); rank 0 saves what came out."""
    seed_everything(seed)
    rank, world = int(os.environ.get("RANK", "0")), options.ranks
    documents = read_documents(options.length)
    ranks = range(world) if aggregator is None else range(rank, rank + 1)
    dealt = Dealt(len(documents), ranks, world, options.batch_size, options.steps, seed)
    loader = DataLoader(documents, batch_sampler=dealt, collate_fn=padded)  # type: ignore[arg-type]
    model = PaddedByteLM(width=options.width, depth=options.depth, heads=2, context=options.length, lr=options.lr)
    start = flat(model)
    trainer = Trainer(
        accelerator="cpu", devices=1 if aggregator is None else world, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
        strategy="auto" if aggregator is None else ls.strategy("strict", aggregator=aggregator),
    )  # fmt: skip
    trainer.fit(model, loader)
    assert model.after_first is not None
    if rank == 0:
        model.eval()
        with torch.no_grad():
            held = documents[:: max(1, len(documents) // 256)]
            sums = [(model._loss(padded([d])) * (len(d) - 1), len(d) - 1) for d in held]
        loss = float(sum(s for s, _ in sums)) / sum(n for _, n in sums)
        result = {"start": start, "first": model.after_first, "end": flat(model), "loss": torch.tensor(loss)}
        torch.save(result, options.out / f"{aggregator or 'alone'}-{seed}.pt")


def launch(options: argparse.Namespace, seed: int, aggregator: str | None) -> dict[str, Tensor]:
    """The result of a run, which is trained in processes of its own unless it is there already."""
    path = options.out / f"{aggregator or 'alone'}-{seed}.pt"
    if not path.exists():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = 1 if aggregator is None else options.ranks
        command = [sys.executable, __file__, *sys.argv[1:], "--run", str(seed), aggregator or "alone"]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        start = partial(subprocess.Popen, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ranks = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
        ranks["TORCHELASTIC_RUN_ID"] = "weights"
        alone = aggregator is None
        processes = [
            start(env=common if alone else {**common, **ranks, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(world)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{path.stem} failed; run it alone to see why: {' '.join(command)}")
    return dict(torch.load(path, weights_only=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 4, "steps": 400, "batch-size": 4, "width": 64, "depth": 2, "length": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("weights-results"))
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.run:
        seed, name = options.run
        train(options, int(seed), None if name == "alone" else name)
        return 0
    print("| seed | aggregator | off after 1 step | off in the end | loss |")
    print("|---|---|---|---|---|")
    for seed in options.seeds:
        true = launch(options, seed, None)
        print(f"| {seed} | one process | | | {true['loss']:.4f} |")
        for aggregator in ("weighted_mean", "mean"):
            found = launch(options, seed, aggregator)
            off = [
                float((found[when] - true[when]).norm() / (true[when] - true["start"]).norm())
                for when in ("first", "end")
            ]
            print(f"| {seed} | {aggregator} | {off[0]:.2e} | {off[1]:.2e} | {found['loss']:.4f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
