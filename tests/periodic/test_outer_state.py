"""The outer optimiser and its scheduler go on where they were."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LRScheduler, SequentialLR

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import Wires
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors import Exact, as_route
from lightning_sync.periodic.anchor import Fragment
from lightning_sync.periodic.buffers import BufferMerge
from lightning_sync.periodic.outer import Nesterov
from lightning_sync.periodic.outer_loop import OuterLoop
from lightning_sync.reducer import Reducer
from lightning_sync.state import ParamSpec


def warm_then_decay(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [ConstantLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[5])


def make_loop(weight: nn.Parameter) -> OuterLoop:
    spec = ParamSpec("weight", tuple(weight.shape), weight.dtype, weight.device)
    wires = Wires(GroupWire(None, Topology(0, (0,)), Counters()))  # type: ignore[arg-type]
    fragment = Fragment([(spec, weight)], weight.device)
    reducer = Reducer(fragment.specs, as_route(Exact()), wires)
    model = nn.Module()
    loop = OuterLoop([fragment], reducer, Nesterov(), warm_then_decay, BufferMerge(model, "average"))
    loop.capture()
    return loop


def exchange(loop: OuterLoop, weight: nn.Parameter, step: int) -> None:
    with torch.no_grad():
        weight.sub_(0.1 * (step + 1))
    loop.start(0, 1.0)
    loop.run(0, step)
    loop.finish(0)


def test_a_nested_scheduler_is_resumed_at_every_exchange() -> None:
    for saved_at in range(9):
        weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        loop = make_loop(weight)
        for step in range(saved_at):
            exchange(loop, weight, step)
        again = nn.Parameter(weight.detach().clone())
        resumed = make_loop(again)
        resumed.load(loop.numbers(), loop.tensors(), outer=True)
        for step in range(saved_at, 10):
            exchange(loop, weight, step)
            exchange(resumed, again, step)
            assert resumed.optimizer.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"]
            assert torch.equal(weight, again)
