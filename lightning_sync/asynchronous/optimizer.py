"""A torch optimiser on a shard: on views of its values, one for each stretch with options of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

ViewFactory = Callable[[Tensor], Optimizer]
"""Makes an optimiser over a shard's values `[n]`: over the tensor itself, or over views that cover it once."""

# By exact class: a subclass may look across elements. Not here: LBFGS (a line search over everything), Adafactor and
# Muon (rows and columns), SparseAdam (other gradients).
_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def check_elementwise(optimizer: Optimizer) -> None:
    """An optimiser that can run on slices of flattened parameters: each element's step depends on that element only.

    Raises:
        ValueError: if it is none of torch's that are known to be so.
    """
    if type(optimizer) not in _ELEMENTWISE:
        names = ", ".join(c.__name__ for c in _ELEMENTWISE)
        raise ValueError(
            f"{type(optimizer).__name__} cannot run on a shard: the owner has pieces of flattened parameters, so it "
            f"must act element by element, as these of torch do: {names}. Use push='delta' for any optimiser."
        )


def like(optimizer: Optimizer, stretches: Sequence[tuple[int, int, int]]) -> ViewFactory:
    """The same optimiser for a shard: same class, same options, without its state.

    Args:
        optimizer: The module's own.
        stretches: What the shard consists of, as (start, stop, index of the parameter group), in order and complete.

    Raises:
        ValueError: if it does not act element by element.
    """
    check_elementwise(optimizer)
    kind: Any = type(optimizer)
    options = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]

    def make(values: Tensor) -> Optimizer:
        # Constructors do not take every option that groups hold; the groups carry them all.
        groups = [{"params": [values[a:b]], **options[group]} for a, b, group in stretches]
        made: Optimizer = kind(groups, lr=options[0]["lr"])
        return made

    return make


class ShardOptimizer:
    """The optimiser that `factory` makes, fed with one flat gradient.

    Args:
        values: The shard, `[n]`.
        factory: Makes the optimiser.

    Raises:
        ValueError: if its parameters do not cover the values exactly once.
    """

    def __init__(self, values: Tensor, factory: ViewFactory) -> None:
        self._optimizer = factory(values)
        self._views: list[tuple[Tensor, int, int]] = []
        for view in (p for group in self._optimizer.param_groups for p in group["params"]):
            same = view.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
            start = view.storage_offset() - values.storage_offset() if same and view.is_contiguous() else -1
            self._views.append((view, start, start + view.numel()))
        ends = sorted((start, stop) for _, start, stop in self._views)
        covered = [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])] if ends else values.numel() == 0
        if not covered or (ends and ends[-1][1] != values.numel()):
            raise ValueError(
                f"The optimiser's parameters are not contiguous views that cover the shard's {values.numel()} values "
                f"once: they lie at {ends}."
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options, which may be changed between steps, such as the learning rate."""
        return self._optimizer.param_groups

    def step(self, gradient: Tensor) -> None:
        """One step with this gradient, `[n]`."""
        for view, start, stop in self._views:
            view.grad = gradient[start:stop].view_as(view)
        self._optimizer.step()
        for view, _, _ in self._views:
            view.grad = None

    def state(self) -> dict[str, Any]:
        """The optimiser's state, in torch's form."""
        return self._optimizer.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._optimizer.load_state_dict(dict(state))
