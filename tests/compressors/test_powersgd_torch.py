"""`PowerSGD(residual="aggregate")` applies what torch's own hook applies, inside a real DDP, in one bucket."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import make_wires
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import PowerSGD, as_route
from lightning_sync.ddp_hook import param_specs
from lightning_sync.reducer import Reducer
from tests.workers import run_ranks

RANK, WARM_UP, STEPS, SEED = 2, 2, 14, 11
OURS = PowerSGD(rank=RANK, warmup_steps=WARM_UP, residual="aggregate")


def torchs_first_factors(shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The random factors that torch's hook starts from, by name, as rows; `shapes` in its bucket's order.

    The hook orthogonalises them, which changes nothing: what is applied depends on the space they span.
    """
    torch.manual_seed(np.random.RandomState(SEED).randint(1_000_000_000))
    return {name: torch.randn(shape[1:].numel(), RANK).T.contiguous() for name, shape in shapes.items()}


def both(rank: int, world_size: int) -> list[dict[str, float]]:
    """Relative difference of the applied gradients, per step and parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 3)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=100)
    theirs = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=WARM_UP,
        min_compression_rate=OURS.min_ratio,
        use_error_feedback=True,
        warm_start=True,
        random_seed=SEED,
        orthogonalization_epsilon=1e-12,
    )
    names = {id(p): spec.name for spec, p in param_specs(model)}
    local: dict[str, Tensor] = {}

    def hook(state: PowerSGDState, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert bucket.is_last(), "one bucket: torch's hook hangs or aborts on gloo with several"
        local.clear()
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            local[names[id(p)]] = g.clone()
        return powerSGD_hook(state, bucket)

    ddp.register_comm_hook(theirs, hook)
    specs = [spec for spec, _ in param_specs(model)]
    reducer = Reducer(specs, as_route(OURS), make_wires(Topology(rank, tuple(range(world_size))), Counters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    differences = []
    for step in range(STEPS):
        x = torch.randn(16, 24, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), x[:, :3].sin()).backward()
        reducer.step = step
        if step == WARM_UP:
            compressed = {n: g.shape for n, g in local.items() if OURS.accepts(next(s for s in specs if s.name == n))}
            assert len(compressed) == 3
            reducer.load_state_dict({"factor": torchs_first_factors(compressed)})
        mine = list(local.values())
        reducer.reduce(list(local), mine)
        applied = {names[id(p)]: p.grad for p in model.parameters()}
        differences.append({n: _relative(applied[n], g) for n, g in zip(local, mine, strict=True)})
        optimizer.step()
    return differences


def _relative(reference: Any, value: Tensor) -> float:
    return float((reference - value).norm() / reference.norm())


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_applies_what_torchs_hook_applies_in_one_bucket(world_size: int) -> None:
    for differences in run_ranks(both, world_size, deadline=60):
        assert len(differences) == STEPS
        worst = [max(d.values()) for d in differences]
        assert max(worst) < 2e-5, worst
