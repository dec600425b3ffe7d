"""Which parameters received a gradient since the last reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from lightning_sync.reducer import Reducer


def used_anywhere(marked: AbstractSet[str], names: Sequence[str], reducer: Reducer) -> set[str]:
    """Those of `names` that are in any rank's `marked` (collective).

    The answer decides what the host does next, so on CUDA this stops the host: the price of unused parameters.
    """
    bits = torch.tensor([name in marked for name in names], dtype=torch.uint8)
    answers = reducer.any(bits.to(reducer.params[0].device)).tolist()
    return {name for name, bit in zip(names, answers, strict=True) if bit}


class GradientMarks:
    """Notes, by name, every parameter whose gradient was accumulated.

    `p.grad is None` does not say it: gradients may be zeroed instead of dropped, and other backwards leave theirs. The
    hooks run inside autograd's accumulation, before DDP's own, so a bucket's communication hook already sees the marks
    of its parameters.

    Args:
        named: The parameters, by name.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._marked: set[str] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._mark(name)) for name, p in named]

    def __contains__(self, name: str) -> bool:
        return name in self._marked

    def clear(self) -> None:
        """Start anew, after a reduction."""
        self._marked.clear()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def take(self) -> frozenset[str]:
        """The marks, which start anew."""
        marked = frozenset(self._marked)
        self._marked.clear()
        return marked

    def used_anywhere(self, names: Sequence[str], reducer: Reducer) -> list[bool]:
        """For each name, whether any rank has marked it (collective); see the function."""
        used = used_anywhere(self._marked, names, reducer)
        return [name in used for name in names]

    def _mark(self, name: str) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._marked.add(name)

        return mark
