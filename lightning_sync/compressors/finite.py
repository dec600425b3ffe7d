"""What is remembered between steps must stay finite: one NaN in a residual would be sent again for ever."""

from __future__ import annotations

from torch import Tensor


def finite_rows(tensor: Tensor) -> Tensor:
    """For each row (first axis), whether all of it is finite.

    A sum over the row is the cheapest look. What is large enough to overflow it is no residual worth keeping.
    """
    return tensor.flatten(1).sum(1).isfinite()


def forget_(tensor: Tensor, sound: Tensor) -> None:
    """Set the rows of `tensor` that are not `sound` to zero, in place."""
    if tensor.device.type == "cpu":
        if not bool(sound.all()):
            tensor[~sound] = 0
    else:  # without stopping the host
        tensor.masked_fill_(~sound.view(-1, *[1] * (tensor.dim() - 1)), 0)
