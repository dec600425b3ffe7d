"""What a strategy does about its data: what batches weigh, and ranks that run out of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_sync import _compat
from lightning_sync.strategies.watched import Watched

if TYPE_CHECKING:
    from lightning_sync.strategies.supply import Supply
    from lightning_sync.strategies.weighing import Weighing


class Fed(Watched):
    """Sees every batch before and after its training step, and does without one where there is none.

    Attributes:
        lock_step: Whether ranks wait for one another in every step anyway, so that a user's own collectives in a step
            cost little.
    """

    mode: str
    lock_step: ClassVar[bool] = False
    _weighing: Weighing
    _supply: Supply
    _in_step = False

    @property
    def weighs(self) -> bool:
        """Whether ranks may differ in what they count for."""
        return self._weighing.asked or self._supply.joining

    @abstractmethod
    def spare_step(self) -> Tensor:
        """What stands in for the training step of a rank without data: a loss without effect."""

    def process_dataloader(self, dataloader: object) -> object:
        """As Lightning's; keeps ranks together that have different numbers of training batches."""
        dataloader = super().process_dataloader(dataloader)
        trainer = self.attached_trainer()
        if trainer is None or not trainer.training or self.world_size == 1 or self._watcher is None:
            return dataloader
        return self._supply.process(trainer, dataloader)

    def on_train_start(self) -> None:
        """Refuse combinations of loaders that cannot be kept together."""
        super().on_train_start()
        trainer = self.attached_trainer()
        assert trainer is not None
        self._supply.check_loaders(trainer)

    def _begin_batch(self) -> bool:
        stops = super()._begin_batch()
        if not stops:
            self._supply.begin_batch()
        return stops

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note which ranks have data, and where a new window of micro-batches begins."""
        self._supply.attend(new_window=self._weighing.begin_batch(batch_idx))
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """As Lightning's; finds out what the batch weighs. Without data nothing is run, logged or learned."""
        if self._supply.spare:
            self._weighing.spare()
            trainer = self.attached_trainer()
            assert trainer is not None
            _compat.forget_step_logs(trainer)
            return self.spare_step()
        batch = args[0]
        self._weighing.see(batch)
        self._in_step = True
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._in_step = False
        self._weighing.hear(batch, output)
        return output

    def why_alone(self) -> str | None:
        """Inside a training step that some rank has no data for, ranks cannot meet."""
        return "some ranks are out of data" if self._in_step and self._supply.short else super().why_alone()
