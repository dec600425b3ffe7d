"""torchft's LocalSGD and DiLoCo as methods: `--plugin recipes/bench/torchft_methods.py --methods torchft-diloco8`.

Needs torchft's wheel (`pip install torchft`, Linux on x86-64). Its Manager, which talks to a lighthouse server and
could go on without a dead rank, is replaced by a plain all-reduce over the run's own process group: what is measured is
what the algorithms send and how they wait, in fp32 (torchft compresses on GPUs with Triton only).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from methods import method
from torch import Tensor, nn

PERIOD = 8


class _Group:
    """What torchft's classes ask of a Manager."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.step = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
        tensor /= dist.get_world_size()
        return dist.all_reduce(tensor, async_op=True)

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def current_step(self) -> int:
        return self.step

    def nothing(self, *args: Any) -> None:
        pass

    start_quorum = allow_state_dict_read = disallow_state_dict_read = register_state_dict_fn = nothing


class TorchftStrategy(DDPStrategy):
    """Local steps, and torchft's hooks on the optimiser's step.

    Args:
        kind: ``"local"`` or ``"diloco"``.
        **options: Of torchft's class.
    """

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self._kind, self._options = kind, options
        self._loop: Any = None

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup(self, trainer: Trainer) -> None:
        """Attach torchft once there are optimisers."""
        from torchft.local_sgd import DiLoCo, LocalSGD

        super().setup(trainer)
        module, (inner,) = self.lightning_module, self.optimizers
        assert isinstance(module, nn.Module)
        if self._kind == "local":
            self._loop = LocalSGD(_Group(), module, inner, sync_every=PERIOD)  # type: ignore[arg-type]
        else:
            outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            options = {"sync_every": PERIOD, "pin_memory": False, **self._options}
            self._loop = DiLoCo(_Group(), [module], inner, outer, **options)  # type: ignore[arg-type]
        self._loop.__enter__()

    def teardown(self) -> None:
        """Take the hooks off."""
        if self._loop is not None:
            self._loop.__exit__(None, None, None)
        super().teardown()


@method("torchft-local8", period=PERIOD)
def local() -> Strategy:
    """torchft's LocalSGD every 8 steps."""
    return TorchftStrategy("local")


@method("torchft-diloco8", period=PERIOD)
def diloco() -> Strategy:
    """torchft's DiLoCo every 8 steps, one fragment, blocking."""
    return TorchftStrategy("diloco")


@method("torchft-diloco8-tau6", period=PERIOD)
def overlapped() -> Strategy:
    """The same, with an all-reduce that starts 6 steps before it is waited for."""
    return TorchftStrategy("diloco", fragment_sync_delay=6)
