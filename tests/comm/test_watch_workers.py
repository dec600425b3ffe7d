"""The helper for distributed tests keeps its promises."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.comm.plain_bodies import fail_on_one, hang_on_one
from tests.workers import RankError, launch_ranks, run_ranks

pytestmark = pytest.mark.dist


def total(rank, world_size, factor):
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor)
    return tensor.item() * factor


def rank_from_torchrun_variables(rank, world_size):
    dist.init_process_group("gloo")
    ranks = [None] * world_size
    dist.all_gather_object(ranks, (dist.get_rank(), os.environ["LOCAL_RANK"]))
    return ranks


def test_results_come_back_by_rank():
    assert run_ranks(total, 3, 10) == [30.0, 30.0, 30.0]


def test_an_exception_shows_the_rank_and_its_traceback():
    with pytest.raises(RankError, match=r"(?s)1 of 2 ranks of fail_on_one failed.*rank 1: exit code 1.*boom"):
        run_ranks(fail_on_one, 2, init="none")


def test_a_rank_that_hangs_is_killed_and_its_output_shown():
    with pytest.raises(RankError, match=r"(?s)ranks \[1\] of hang_on_one did not end.*I hang"):
        launch_ranks(hang_on_one, 2, deadline=6, init="none")


def test_env_looks_like_torchrun():
    assert run_ranks(rank_from_torchrun_variables, 2, init="env") == [[(0, "0"), (1, "1")]] * 2


def test_a_local_function_is_refused():
    with pytest.raises(ValueError, match="top level of its module"):
        run_ranks(lambda rank, world_size: None, 2)
