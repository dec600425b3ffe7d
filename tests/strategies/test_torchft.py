"""Where the algorithms agree, local SGD, DiLoCo and streaming DiLoCo give torchft's numbers (its wheel, on the CPU)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_sync as ls
from tests.models import Noise, fit
from tests.strategies.by_hand import Sharded
from tests.workers import run_ranks

STEPS = 24
FRAGMENTS = [["first*", "layers.0*"], ["layers.1*", "last*"]]


class Plain(Sharded):
    """torchft averages every parameter and no buffer, so: none frozen, none unused, no BatchNorm."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, depth=2, adam=True, lr=1e-2)
        self.norm = nn.Identity()
        self.sometimes = nn.Identity()
        del self.frozen
        self.register_buffer("frozen", torch.ones(32))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(Noise(), list(self.shard)), batch_size=4)


class Group:
    """What torchft's classes ask of its Manager, over the default process group."""

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


def theirs(rank: int, world: int, kind: str) -> dict[str, Tensor]:
    from torchft.local_sgd import DiLoCo, LocalSGD

    torch.manual_seed(3)
    module = Plain(rank, world)
    inner = module.configure_optimizers()
    options: dict[str, Any] = {"sync_every": 8, "pin_memory": False}
    if kind == "local SGD":
        loop = LocalSGD(Group(), module, inner, sync_every=8)  # type: ignore[arg-type]
    elif kind == "DiLoCo":
        outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        loop = DiLoCo(Group(), [module], inner, outer, **options)  # type: ignore[arg-type]
    else:
        parts = [nn.ModuleList([module.first, module.layers[0]]), nn.ModuleList([module.layers[1], module.last])]
        outers = [torch.optim.SGD(p.parameters(), lr=0.7, momentum=0.9, nesterov=True) for p in parts]
        options |= {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
        loop = DiLoCo(Group(), parts, inner, outers, **options)  # type: ignore[arg-type]
    with loop:
        done = 0
        while done < STEPS:
            for x, y in module.train_dataloader():
                if done < STEPS:
                    inner.zero_grad()
                    nn.functional.mse_loss(module(x), y).backward()
                    inner.step()
                    done += 1
    return {n: p.detach().clone() for n, p in module.named_parameters()}


FORMS: dict[str, dict[str, Any]] = {
    "local SGD": {},
    "DiLoCo": {"outer_optimizer": ls.Nesterov()},
    "streaming DiLoCo": {
        "outer_optimizer": ls.Nesterov(),
        "fragments": FRAGMENTS,
        "overlap_steps": 2,
        "local_weight": 0.5,
    },
}


class Stops(ls.HybridStrategy):
    """Without the exchange that ends a run, which torchft does not make."""

    def finish_training(self) -> None:
        pass


def compared(rank: int, world: int) -> dict[str, float]:
    found = {}
    for kind, options in FORMS.items():
        torch.manual_seed(3)
        module = Plain(rank, world)
        fit(module, Stops(sync_every=8, **options), world, max_steps=STEPS, use_distributed_sampler=False)
        expected = theirs(rank, world, kind)
        found[kind] = max(float((expected[n] - p).abs().max()) for n, p in module.named_parameters())
    return found


@pytest.mark.dist
def test_equal_to_torchft() -> None:
    pytest.importorskip("torchft")
    for errors in run_ranks(compared, 2, init="env", deadline=150):
        assert all(error < 1e-6 for error in errors.values()), errors
