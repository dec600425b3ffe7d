"""What a batch weighs, as Lightning sees it, and what becomes of its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_sync.aggregators.weighted_mean import is_weighted
from lightning_sync.weights import Contribution, Weight, Window, as_weight, silenced

if TYPE_CHECKING:
    from lightning_sync.strategies.base import SyncStrategy

#: The module's method, and the key in what its training step returns.
METHOD, KEY = "batch_weight", "weight"


class Weighing:
    """Follows the micro-batches of a step.

    Args:
        strategy: The strategy it belongs to. Weights are asked for if its aggregator is a weighted one; otherwise every
            micro-batch counts 1.
    """

    def __init__(self, strategy: SyncStrategy) -> None:
        self._strategy = strategy
        self._window = Window()
        self._weight: Weight = 1.0
        self._factor: Weight = 1.0
        self._batch = 0
        self._batches: list[int] = []

    @property
    def asked(self) -> bool:
        """Whether batches differ in what they count for."""
        return is_weighted(self._strategy.aggregator)

    def begin_batch(self, batch_idx: int) -> bool:
        """Begin a new window where Lightning zeroes gradients; returns whether this is where."""
        module = self._strategy.lightning_module
        assert module is not None
        self._batch += 1
        begins = module.automatic_optimization and batch_idx % module.trainer.accumulate_grad_batches == 0
        if begins:
            self._window.clear()
            self._batches = []
        return begins

    def see(self, batch: Any) -> None:
        """Weigh a batch before its training step."""
        module = self._strategy.lightning_module
        method = getattr(module, METHOD, None)
        self._weight = 1.0
        if not self.asked:
            return
        if method is not None:
            self._weight = self._checked(method(batch))
        elif module is not None and not module.automatic_optimization:
            self._weight = self._batch_size(batch)

    def hear(self, batch: Any, output: Any) -> None:
        """Weigh it by what its training step has returned.

        Raises:
            ValueError: if the weight is given twice, or in the output of a step that has done its backward already.
        """
        module = self._strategy.lightning_module
        if not self.asked or module is None:
            return
        given = output[KEY] if isinstance(output, Mapping) and KEY in output else None
        by_method = getattr(module, METHOD, None) is not None
        if given is not None and (by_method or not module.automatic_optimization):
            raise ValueError(
                f"training_step returns a {KEY!r}, but "
                + ("the module has a method batch_weight as well. Leave one of them out."
                   if by_method
                   else "with manual optimisation that is too late. Define batch_weight(batch) instead.")
            )  # fmt: skip
        if given is not None:
            self._weight = self._checked(given)
        elif not by_method and module.automatic_optimization:
            self._weight = self._batch_size(batch)

    def spare(self) -> None:
        """The step has no batch: it counts nothing."""
        self._weight = 0.0

    def scale(self, loss: Tensor) -> Tensor:
        """Take note of a backward; returns what to differentiate (the same tensor if nothing changes)."""
        self._factor = self._window.add(self._weight)
        module = self._strategy.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            self._batches.append(self._batch)
            if 1 < len(set(self._batches)) < len(self._batches):
                raise ValueError(
                    "Weights with manual optimisation: gradients are accumulated over several batches (toggle_model("
                    "sync_grad=False)), each with several backwards. Which of them belong together cannot be told; "
                    "use one backward per batch, or aggregator='mean'."
                )
        if isinstance(self._factor, Tensor) or self._factor not in (0.0, 1.0):
            return loss * self._factor
        return loss

    def silencing(self) -> AbstractContextManager[None]:
        """For the time of a backward: gradients become zero, if the batch counts nothing."""
        module = self._strategy.lightning_module
        assert module is not None
        if isinstance(self._factor, Tensor):
            return silenced(module.parameters(), unless=self._factor > 0)
        return silenced(module.parameters()) if self._factor == 0 else nullcontext()

    def close(self) -> Contribution:
        """What this rank brings to the reduction of this window."""
        module = self._strategy.lightning_module
        assert module is not None
        divisor = float(module.trainer.accumulate_grad_batches) if module.automatic_optimization else None
        self._batches = []
        return self._window.close(divisor if self.asked else None)

    def _checked(self, value: object) -> Weight:
        return as_weight(value, self._strategy.global_rank, self._strategy.counters.steps)

    def _batch_size(self, batch: Any) -> Weight:
        if isinstance(batch, Iterator):
            raise ValueError(
                "aggregator='weighted_mean': training_step(dataloader_iter) gets no batch whose size could be taken. "
                f"Return its weight under the key {KEY!r}."
            )
        return float(extract_batch_size(batch))
