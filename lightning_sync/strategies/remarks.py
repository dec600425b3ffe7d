"""What the log says when training starts."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sync.compressors import ErrorFeedback
from lightning_sync.periodic.period import Period
from lightning_sync.reducer import Reducer

#: Fewer exchanges than this in a run are warned about.
FEW_EXCHANGES = 20


def say_bytes(reducer: Reducer, mode: str, compressor: str, per: str) -> None:
    """Say what travels per step or exchange, with a warning if plain bf16 would send less."""
    ours, plain = reducer.interface_bytes(), reducer.bf16_interface_bytes()
    if compressor not in ("none", "bf16", "fp16") and ours >= plain > 0:
        rank_zero_warn(
            f"compressor={compressor!r} sends {ours:,} bytes per {per} through each network interface in this "
            f"topology, plain bf16 would send {plain:,}. Use compressor='bf16', or two_level=True with equal ranks per "
            "node."
        )
    else:
        rank_zero_info(f"{mode}, {compressor}: {ours:,} bytes per {per} and interface (plain bf16: {plain:,}).")
    wrapped = [c.inner for _, c in reducer.route.rules if isinstance(c, ErrorFeedback)]
    if wrapped:
        rank_zero_info(f"Error feedback is kept for {wrapped}, since they are biased (error_feedback=False: bare).")


def say_replicas(mode: str, replicas: Sequence[Sequence[int]], period: Period, warmup_steps: int) -> None:
    """Say who meets when."""
    sizes = {len(ranks) for ranks in replicas}
    rank_zero_info(
        f"{mode}: {len(replicas)} replicas of {sorted(sizes)} ranks, gradients averaged inside each in every step, "
        f"exchanges between them by {period!r}"
        + (f" after {warmup_steps} steps of averaging over all." if warmup_steps else ".")
    )


def warn_if_short(trainer: Trainer, every: int, warmup_steps: int) -> None:
    """Warn about a run of fewer than 20 exchanges, one every `every` steps after the warm-up."""
    steps = trainer.estimated_stepping_batches
    exchanges = (steps - warmup_steps) / every
    if exchanges < FEW_EXCHANGES:
        rank_zero_warn(
            f"This run has about {max(0, int(exchanges))} exchanges ({steps:g} steps, sync_every={every}, "
            f"warmup_steps={warmup_steps}); with fewer than {FEW_EXCHANGES} replicas hardly learn from one another. "
            "Lower sync_every or warmup_steps."
        )
