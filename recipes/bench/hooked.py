"""DDPStrategy with one of torch's communication hooks, also on CPUs: what others' compression is compared as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel


class HookedDDPStrategy(DDPStrategy):
    """DDPStrategy whose comm hook is registered on every device; Lightning drops hooks off CUDA without a word.

    Args:
        hook: The comm hook.
        state: Makes the hook's state, None for a hook without.
        **kwargs: As for DDPStrategy.
    """

    def __init__(self, hook: Callable[..., Any], state: Callable[[], object] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hook = hook
        self._make_state = state

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._make_state() if self._make_state else None, self._hook)
