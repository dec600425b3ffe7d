"""Whatever fails on one rank, every rank ends within 10 s, and says what failed, where, and how."""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import lightning_sync as ls
from lightning_sync.compressors import Compressor, Reduction
from tests.models import Toy, fit
from tests.workers import RankOutcome, launch_ranks

WHEN = 4


@dataclass(frozen=True)
class FailingCompressor(Compressor):
    """Exact, but raises on rank 1 in step 4."""

    biased: ClassVar[bool] = False

    def init(self, params: Any) -> Any:
        return ls.Exact().init(params)

    def reduce(self, keys: Any, tensors: Any, state: Any) -> Reduction:
        if state.step == WHEN and state.rank == 1:
            raise ZeroDivisionError("boom in a reduction")
        return (yield from ls.Exact().reduce(keys, tensors, state))

    def wire_bytes(self, params: Any, topology: Any, step: int | None = None) -> Any:
        return ls.Exact().wire_bytes(params, topology)


def failing_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if torch.distributed.get_rank() == 1:
        raise ZeroDivisionError("boom in a hook")
    return allreduce_hook(None, bucket)


class FailingStep(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == WHEN:
            raise ZeroDivisionError("boom in a training step")
        return super().training_step(batch, batch_idx)


class FailingValidation(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:
            raise ZeroDivisionError("boom in validation")
        super().validation_step(batch, batch_idx)


def run(rank: int, world_size: int, what: str) -> None:
    torch.manual_seed(0)
    module = Toy()
    strategy: Any = ls.StrictStrategy(bucket_cap_mb=0.005, compressor="int8")
    options: dict[str, Any] = {}
    if what == "reduction":
        strategy = ls.StrictStrategy(bucket_cap_mb=0.005, compressor=FailingCompressor())
    elif what == "hook":
        strategy = ls.StrictStrategy(ddp_comm_hook=failing_hook)
    elif what == "training step":
        module = FailingStep()
    elif what == "training step, no compressor":
        module, strategy = FailingStep(), "strict"
    elif what == "training step, un-wrapped":
        module, strategy = FailingStep(), ls.UnwrappedStrategy(replica=world_size)
    elif what == "validation":
        module, options = (
            FailingValidation(),
            {"limit_val_batches": 2, "val_check_interval": 4, "num_sanity_val_steps": 0},
        )
    fit(module, strategy, world_size, max_steps=1000, **options)


@pytest.mark.dist
@pytest.mark.parametrize(
    "what",
    [
        "reduction",
        "hook",
        "training step",
        "training step, no compressor",
        "training step, un-wrapped",
        "validation",
    ],
)
def test_every_rank_ends_with_the_original_message(what: str) -> None:
    start = time.monotonic()
    outcomes: list[RankOutcome] = launch_ranks(run, 3, what, init="env", deadline=90)
    first, last = (f(o.seconds for o in outcomes) for f in (min, max))
    assert time.monotonic() - start < 90
    for outcome in outcomes:
        assert outcome.exit_code not in (0, None), (what, outcome)
        assert "ZeroDivisionError: boom in a " in outcome.stderr or "ZeroDivisionError: boom in v" in outcome.stderr, (
            outcome.stderr
        )
    assert last - first < 10, [o.seconds for o in outcomes]
    assert "rank 1" in outcomes[0].stderr
