#!/usr/bin/env python3
"""Does a run survive other numbers of ranks? Trains the byte model on 2, then 4, then 3 ranks, and 2 ranks throughout.

    python recipes/worlds.py                                    # the full model, int8 and powersgd
    python recipes/worlds.py --width 64 --depth 2 --length 64   # minutes on 2 cores

Each leg is one epoch of equal global batches and resumes from the checkpoint of the leg before; residuals are spread
over the new ranks. The table compares validation losses after equal samples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

GLOBAL_BATCH = 24
LEGS = (2, 4, 3)
COMPRESSORS = ("int8", "powersgd")


def leg(options: argparse.Namespace) -> None:
    """One leg, in this process and those that Lightning starts beside it."""
    import torch
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    import lightning_sync as ls
    from lightning_sync.examples.byte_lm import ByteLM
    from lightning_sync.examples.python_source import PythonSource

    class Until(Callback):
        """Ends after an epoch, though the learning rate is planned for all legs."""

        def on_train_epoch_end(self, trainer: Trainer, pl_module: object) -> None:
            trainer.should_stop = trainer.current_epoch + 1 >= options.until

    torch.set_num_threads(1)
    seed_everything(options.seed, verbose=False)
    compressor = ls.PowerSGD(rank=4, warmup_steps=options.steps // 3) if options.compressor == "powersgd" else "int8"
    trainer = Trainer(
        strategy=ls.StrictStrategy(compressor),
        accelerator="cpu",
        devices=options.ranks,
        max_epochs=len(LEGS),
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Until(), ModelCheckpoint(options.out, filename="{epoch}", save_top_k=-1)],
    )
    data = PythonSource(
        batch_size=GLOBAL_BATCH // options.ranks,
        length=options.length,
        train_sequences=GLOBAL_BATCH * options.steps,
    )
    model = ByteLM(width=options.width, depth=options.depth, context=options.length)
    trainer.fit(model, datamodule=data, ckpt_path=options.resume)
    if trainer.is_global_zero:
        result = {"val_loss": float(trainer.callback_metrics["val_loss"]), "steps": trainer.global_step}
        (options.out / "result.json").write_text(json.dumps(result))


def start(options: argparse.Namespace, out: Path, ranks: int, until: int, resume: Path | None) -> dict[str, float]:
    """Run one leg in processes of its own, unless its result is there already."""
    result = out / "result.json"
    if not result.exists():
        out.mkdir(parents=True, exist_ok=True)
        common = ("steps", "width", "depth", "length", "seed", "compressor")
        command = [sys.executable, __file__, "--out", str(out), "--ranks", str(ranks), "--until", str(until)]
        for name in common:
            command += [f"--{name}", str(getattr(options, name))]
        if resume is not None:
            command += ["--resume", str(resume)]
        with (out / "log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return dict(json.loads(result.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of a leg")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("worlds-results"))
    for name, kind in (("--ranks", int), ("--until", int), ("--resume", str), ("--compressor", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks is not None:
        leg(options)
        return
    print(
        "| compressor | 2 ranks throughout | 2 -> 4 -> 3 ranks | difference | steps |\n|---|---|---|---|---|",
        flush=True,
    )
    for options.compressor in COMPRESSORS:
        place = options.out / options.compressor
        whole = start(options, place / "whole", LEGS[0], len(LEGS), None)
        resume: Path | None = place / "whole" / "epoch=0.ckpt"  # the first leg is the same
        for number, ranks in enumerate(LEGS[1:], 2):
            changed = start(options, place / f"leg-{number}", ranks, number, resume)
            resume = place / f"leg-{number}" / f"epoch={number - 1}.ckpt"
        assert changed["steps"] == whole["steps"]
        before, after = whole["val_loss"], changed["val_loss"]
        difference = 100 * (after / before - 1)
        print(
            f"| {options.compressor} | {before:.4f} | {after:.4f} | {difference:+.2f} % | {whole['steps']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
