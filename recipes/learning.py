#!/usr/bin/env python3
"""What a way of synchronising costs in learning: trains every row of a suite and compares validation losses.

    python recipes/learning.py modes                 # strict, local SGD, DiLoCo, delayed, ...: hours on 2 cores
    python recipes/learning.py compressors           # every compressor, next to none and torch's hooks
    python recipes/learning.py deltas                # compressed differences of DiLoCo
    python recipes/learning.py digits                # compressors on a second task: minutes
    python recipes/learning.py modes --rows strict diloco64 --seeds 0 --steps 500

Every run is `python -m lightning_sync.train` in 4 processes (one without others for the row "alone"), with equal steps
and data. The first seed runs with every learning rate of one grid that is the same for all rows; each row's other seeds
run with its best. Runs that are there already are not repeated, so a command that was stopped goes on where it was.

The table shows the mean validation loss over the seeds at the end, its distance from the first row's, the spread of the
seeds (largest minus smallest), which any distance has to be held against, counted bytes per rank and step, and the
distance from the first row along the way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runs import curve, mean_and_spread, train

WARMUP = 300
_WARM = f"strategy.warmup_steps={WARMUP}"


@dataclass(frozen=True)
class Suite:
    """Rows that are compared with the first of them.

    Attributes:
        rows: Overrides of `lightning_sync.train` by the row's name.
        task: Overrides that all rows share; `{batch}`, `{length}` and `{rate}` are filled in.
        steps: Steps of every run.
        batch: Samples per rank and step.
        length: Bytes per sample.
        grid: Learning rates to choose from.
        every: Steps between two validations.
    """

    rows: dict[str, tuple[str, ...]]
    task: tuple[str, ...]
    steps: int
    batch: int
    length: int
    grid: tuple[float, ...]
    every: int


def compressor(name: str, *more: str) -> tuple[str, ...]:
    """Overrides for a compressor of `conf/compressor/`, strict mode."""
    return (f"compressor={name}", *more)


def later(target: str, **options: object) -> tuple[str, ...]:
    """Overrides for a compressor that starts after the warm-up, uncompressed until then."""
    fields = "".join(f",{key}:{value}" for key, value in options.items())
    return (
        "compressor=schedule",
        f"compressor.phases=[[0,none],[{WARMUP},{{_target_:lightning_sync.compressors.{target}{fields}}}]]",
    )


def hook(path: str, **state: object) -> tuple[str, ...]:
    """Overrides for a comm hook of torch under DDPStrategy, which Lightning would not register off CUDA."""
    words = [
        "strategy=ddp",
        "strategy._target_=hooked.HookedDDPStrategy",
        f"+strategy.hook={{_target_:hydra.utils.get_method,path:torch.distributed.algorithms.ddp_comm_hooks.{path}}}",
    ]
    if state:
        fields = ",".join(f"{key}:{value}" for key, value in state.items())
        target = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState"
        words += [f"+strategy.state={{_target_:{target},_partial_:true,process_group:null,{fields}}}"]
        words += ["strategy.bucket_cap_mb=1000"]  # one bucket: with several the hook can hang on gloo
    return tuple(words)


BYTES = (
    *("data=python_source", "data.batch_size={batch}", "data.length={length}"),
    *("model=byte_lm", "model.context={length}", "model.lr={rate}"),
)
DIGITS = ("experiment=digits", "trainer.max_epochs=null", "data.batch_size={batch}", "model.lr={rate}")
MODES = {
    "strict": ("strategy=strict",),
    "diloco16": ("strategy=diloco", _WARM, "strategy.sync_every=16"),
    "local_sgd16": ("strategy=local_sgd", _WARM, "strategy.sync_every=16"),
    "diloco64": ("strategy=diloco", _WARM, "strategy.sync_every=64"),
    "local_sgd64": ("strategy=local_sgd", _WARM, "strategy.sync_every=64"),
    "streaming64": ("strategy=streaming_diloco", _WARM, "compressor=int8"),
    "local_sgd8": ("strategy=local_sgd", _WARM, "strategy.sync_every=8"),
    "slowmo": ("strategy=slowmo", _WARM),
    "delayed": ("strategy=delayed",),
    "alone": ("strategy=strict", "trainer.devices=1"),
}
COMPRESSORS = {
    "none": compressor("none"),
    "bf16": compressor("bf16"),
    "fp16": compressor("fp16"),
    "fp8": compressor("fp8"),
    "int8": compressor("int8"),
    "int4": compressor("int4"),
    "qsgd": compressor("qsgd"),
    "sign": later("Sign"),
    "powersgd": compressor("powersgd", f"compressor.warmup_steps={WARMUP}"),
    "acp": compressor("acp", f"compressor.warmup_steps={WARMUP}"),
    "topk": later("ChunkTopK"),
    "random_block": later("RandomBlock"),
    "torch fp16": hook("default_hooks.fp16_compress_hook"),
    "torch powersgd": hook(
        "powerSGD_hook.powerSGD_hook", matrix_approximation_rank=4, start_powerSGD_iter=WARMUP, warm_start="true"
    ),
}
_DILOCO = MODES["diloco16"]
DELTAS = {
    "none": _DILOCO,
    "int8": (*_DILOCO, "compressor=int8"),
    "int4": (*_DILOCO, "compressor=int4"),
    "sign": (*_DILOCO, "compressor=sign"),
    "topk 2 %, 2 bits": (*_DILOCO, *compressor("topk", "compressor.ratio=0.02", "compressor.values=2bit")),
}
SUITES = {
    "modes": Suite(MODES, BYTES, steps=2000, batch=8, length=128, grid=(2e-3, 4e-3), every=250),
    "compressors": Suite(COMPRESSORS, BYTES, steps=1000, batch=8, length=64, grid=(2e-3, 4e-3), every=250),
    "deltas": Suite(DELTAS, BYTES, steps=2000, batch=8, length=64, grid=(2e-3, 4e-3), every=250),
    "digits": Suite(COMPRESSORS, DIGITS, steps=300, batch=16, length=1, grid=(1e-3, 3e-3), every=50),
}


class Runs:
    """The runs of one suite, each in a folder of its own."""

    def __init__(self, name: str, suite: Suite, out: Path) -> None:
        self.name, self.suite, self.out = name, suite, out

    def folder(self, row: str, rate: float, seed: int) -> Path:
        """Where a run is."""
        s = self.suite
        words = "".join(c if c.isalnum() else "_" for c in row)
        return self.out / self.name / f"{words}-{rate:g}-{s.batch}x{s.length}-{s.steps}-{seed}"

    def run(self, row: str, rate: float, seed: int) -> dict[str, Any] | None:
        """Its summary, or `None` if it failed."""
        s = self.suite
        task = [word.format(batch=s.batch, length=s.length, rate=rate) for word in s.task]
        return train(
            self.folder(row, rate, seed),
            *(*task, f"seed={seed}", "trainer.devices=4", f"trainer.max_steps={s.steps}"),
            *(f"trainer.val_check_interval={s.every}", "trainer.check_val_every_n_epoch=null"),
            *s.rows[row],
        )

    def best_rate(self, row: str, seed: int) -> float:
        """The rate of the grid with the lowest loss in the end."""
        losses = {rate: (self.run(row, rate, seed) or {}).get("val_loss", float("inf")) for rate in self.suite.grid}
        return min(losses, key=lambda rate: losses[rate])


def show(runs: Runs, rows: Sequence[str], seeds: Sequence[int]) -> bool:
    """Train what is missing and print the table; returns whether all runs ended well."""
    suite, reference, complete = runs.suite, None, True
    along = range(suite.every, suite.steps, suite.every)
    print(
        f"| {runs.name} | rate | val loss | spread | against {rows[0]} | bytes/step | at {', '.join(map(str, along))} |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for row in rows:
        rate = runs.best_rate(row, seeds[0])
        summaries = {seed: runs.run(row, rate, seed) for seed in seeds}
        done = {seed: summary for seed, summary in summaries.items() if summary is not None}
        complete &= len(done) == len(seeds)
        if not done:
            continue
        loss, spread = mean_and_spread([summary["val_loss"] for summary in done.values()])
        curves = [curve(runs.folder(row, rate, seed)) for seed in done]
        path = {step: mean_and_spread([c[step] for c in curves])[0] for step in along}
        reference = reference or (loss, path)
        gaps = " ".join(f"{100 * (value / reference[1][step] - 1):+.1f}" for step, value in path.items())
        sent = next(iter(done.values())).get("wire_bytes_per_step")
        print(
            f"| {row} | {rate:g} | {loss:.4f} | {spread:.4f} | {100 * (loss / reference[0] - 1):+.2f} % "
            f"| {'not counted' if sent is None else format(sent, ',.0f')} | {gaps} |",
            flush=True,
        )
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--rows", nargs="+", help="only these; the first is what the others are compared with")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps of every run")
    parser.add_argument("--batch", type=int, help="samples per rank and step")
    parser.add_argument("--length", type=int, help="bytes per sample")
    parser.add_argument("--grid", nargs="+", type=float, metavar="RATE", help="learning rates to choose from")
    parser.add_argument("--every", type=int, help="steps between two validations")
    parser.add_argument("--out", type=Path, default=Path("learning-results"))
    options = parser.parse_args()
    suite = SUITES[options.suite]
    given = {key: getattr(options, key) for key in ("steps", "batch", "length", "every") if getattr(options, key)}
    suite = replace(suite, **given, grid=tuple(options.grid or suite.grid))
    rows = options.rows or list(suite.rows)
    unknown = [row for row in rows if row not in suite.rows]
    if unknown:
        parser.error(f"--rows {' '.join(unknown)}: not in suite {options.suite}. Accepted: {', '.join(suite.rows)}.")
    return 0 if show(Runs(options.suite, suite, options.out), rows, options.seeds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
