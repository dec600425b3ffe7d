"""Says so when a run is too short for replicas to learn from one another."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

#: Fewer exchanges than this in a run are warned about.
FEW_EXCHANGES = 20


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
