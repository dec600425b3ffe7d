#!/usr/bin/env python3
"""What encoding and decoding cost, beside a plain copy and torch's stock ways: one process, one thread, no root.

    python recipes/bench/codecs.py                                      # all compressors of this package
    python recipes/bench/codecs.py int8 "ErrorFeedback(Sign(block=1024))" torch:fp16

For every compressor one bucket of 25 MiB of float32 goes through its reduction as on one rank of `--ranks`; what the
other ranks would send is made up and not counted. Names get error feedback where they are biased, as in training.
Times are those of one thread on a processor, so that waiting for one does not count; a busy machine still slows them
down, as caches and memory are shared.

| column | meaning |
|---|---|
| encode ms | from gradients to the first payload, residual included |
| decode ms | from the last payload to gradients |
| owner ms | in between: what an owner does for its part of all ranks' payloads, or PowerSGD's second product |
| share of copy | time of `Tensor.copy_` of the bucket, over encode + decode; measured in turns, median of the rounds |
| wire ratio | bytes of the gradients over bytes of the payload |

Compilation, where it is used, is paid before measuring and printed by the package.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightning_sync.compressors as compressors
from lightning_sync.compressors.base import Compressor
from lightning_sync.compressors.resolve import with_feedback
from lightning_sync.planner.measure import CodecRun

MIB = 2**20
OURS = (
    *("none", "bf16", "fp16", "fp8", "int8", "BlockInt8(stochastic=True)", "int4", "BlockInt4(stochastic=True)"),
    *("sign", "sign_vote", "qsgd", "topk", "RandomBlock()", "PowerSGD(rank=1, warmup_steps=0)"),
    "PowerSGD(rank=4, warmup_steps=0)",
)
STOCK = ("torch:fp16", "torch:int8", "torch:topk")
# The matrices of one GPT-2 block; the last one is cut off.
SHAPES = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]


def bucket(mib: float) -> list[tuple[int, ...]]:
    """Shapes of one bucket."""
    left, shapes = int(mib * MIB / 4), []
    while left > 0:
        shape = SHAPES[len(shapes) % len(SHAPES)]
        rows = min(shape[0], max(1, left // shape[1]))
        shapes.append((rows, shape[1]))
        left -= rows * shape[1]
    return shapes


def made(name: str) -> Compressor:
    """A compressor from its name, or from a call such as ``ErrorFeedback(Sign(block=1024))``."""
    built = _value(ast.parse(name, mode="eval").body) if "(" in name else compressors.registry.build(name)
    if not isinstance(built, Compressor):
        raise ValueError(f"{name!r} is not a compressor.")
    return with_feedback(built)


def _value(node: ast.expr) -> Any:
    """A constant, or a call of a class of this package with such arguments."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in compressors.__all__:
        keywords = {str(k.arg): _value(k.value) for k in node.keywords}
        return getattr(compressors, node.func.id)(*map(_value, node.args), **keywords)
    return ast.literal_eval(node)


class Timed:
    """One compressor on one bucket, in processor time."""

    def __init__(self, compressor: Compressor, gradients: Sequence[Tensor], ranks: int) -> None:
        self.run = CodecRun(compressor, gradients, ranks, time.thread_time)
        self.payload = 0

    def step(self) -> tuple[float, float, float]:
        """Seconds of encoding, of an owner's work, and of decoding."""
        took = self.run.step()
        self.payload = took.payload_bytes
        return took.encode, took.owner, took.decode


class Stock:
    """What torch's own hooks do to a bucket, without the wire."""

    def __init__(self, name: str, flat: Tensor) -> None:
        self.flat, self.payload = flat, 0
        self.encode, self.decode = {"fp16": _fp16, "int8": _int8, "topk": _topk}[name](flat)

    def step(self) -> tuple[float, float, float]:
        """As `Timed.step`."""
        start = time.thread_time()
        code = self.encode()
        middle = time.thread_time()
        self.decode(code)
        self.payload = sum(t.nbytes for t in code)
        return middle - start, 0.0, time.thread_time() - middle


Pair = tuple[Callable[[], tuple[Tensor, ...]], Callable[[tuple[Tensor, ...]], Any]]


def _fp16(flat: Tensor) -> Pair:
    return lambda: (flat.to(torch.float16).div_(4),), lambda code: flat.copy_(code[0])


def _int8(flat: Tensor) -> Pair:
    """quantization_pertensor_hook: an affine code of one scale, no error feedback."""
    from torch.ao.quantization import MinMaxObserver
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as hooks

    def encode() -> tuple[Tensor, ...]:
        observer = MinMaxObserver()
        observer(flat)
        scale, zero = observer.calculate_qparams()
        return hooks._quantize_per_tensor_backend(flat, scale, zero), scale, zero

    return encode, lambda code: flat.copy_(hooks._dequantize_per_tensor_backend(code[0].float(), code[1], code[2]))


def _topk(flat: Tensor) -> Pair:
    """`torch.topk` of 1 %."""

    def encode() -> tuple[Tensor, ...]:
        index = flat.abs().topk(len(flat) // 100).indices
        return flat[index], index.to(torch.int32)

    return encode, lambda code: flat.zero_().index_add_(0, code[1], code[0])


def measure(names: Sequence[str], mib: float, ranks: int, rounds: int) -> Iterator[dict[str, Any]]:
    """One row per name."""
    shapes = bucket(mib)
    for name in names:
        generator = torch.Generator().manual_seed(0)
        flat = torch.randn(sum(a * b for a, b in shapes), generator=generator)
        flat.mul_(torch.randn(-(-len(flat) // 4096), generator=generator).exp().repeat_interleave(4096)[: len(flat)])
        original, third, other = flat.clone(), flat.clone(), torch.empty_like(flat)
        parts = [p.view(s) for p, s in zip(flat.split([a * b for a, b in shapes]), shapes, strict=True)]
        kind, _, stock = name.partition(":")
        subject = Stock(stock, flat) if kind == "torch" else Timed(made(name), parts, ranks)
        subject.step()
        times, shares = [], []
        for _ in range(rounds):
            flat.copy_(original)
            start = time.thread_time()
            other.copy_(third)  # as cold as the gradients: last touched a round ago
            copy = time.thread_time() - start
            encode, owner, decode = subject.step()
            times.append((encode, owner, decode))
            shares.append(copy / (encode + decode))
        encode, owner, decode = (1e3 * min(t[i] for t in times) for i in range(3))
        yield {
            "name": name,
            "encode_ms": encode,
            "owner_ms": owner,
            "decode_ms": decode,
            "share": statistics.median(shares),
            "wire_ratio": flat.nbytes / max(1, subject.payload),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file."""
    parser = argparse.ArgumentParser(description="Cost of encoding and decoding beside a copy (CPU, one thread).")
    parser.add_argument(
        "names", nargs="*", default=[*OURS, *STOCK], help="compressors, or torch:fp16, torch:int8, torch:topk"
    )
    parser.add_argument("--mib", type=float, default=25.0, help="size of the bucket (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the group (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=25, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="keep the rows here")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    torch.set_num_threads(1)
    rows = []
    print(f"One thread, {chosen.mib:g} MiB of float32, one rank of {chosen.ranks}; best of {chosen.rounds} rounds.\n")
    print("| compressor | encode ms | decode ms | share of copy | owner ms | wire ratio |\n|---|---|---|---|---|---|")
    with torch.no_grad():
        for row in measure(chosen.names, chosen.mib, chosen.ranks, chosen.rounds):
            rows.append(row)
            print(
                f"| `{row['name']}` | {row['encode_ms']:.1f} | {row['decode_ms']:.1f} | {row['share']:.2f} "
                f"| {row['owner_ms']:.1f} | {row['wire_ratio']:.1f} |",
                flush=True,
            )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
