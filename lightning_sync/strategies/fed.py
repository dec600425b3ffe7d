"""What a strategy does about its data: what batches weigh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_sync.strategies.watched import Watched

if TYPE_CHECKING:
    from lightning_sync.strategies.weighing import Weighing


class Fed(Watched):
    """Sees every batch before and after its training step."""

    _weighing: Weighing

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """As Lightning's; finds out what the batch weighs."""
        batch = args[0]
        self._weighing.see(batch)
        output = super().training_step(*args, **kwargs)
        self._weighing.hear(batch, output)
        return output
