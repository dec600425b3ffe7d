"""Every block has exactly one owner, which depends on the parameters alone and not on buckets."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sync.compressors import BlockInt8, ErrorFeedback
from lightning_sync.compressors.blocks import block_plan
from lightning_sync.state import State
from lightning_sync.testing import make_specs

BLOCK = 8
shapes = st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)


def states(sizes: list[tuple[int, ...]], world_size: int) -> list[State]:
    specs = make_specs({f"p{i}": s for i, s in enumerate(sizes)})
    made = []
    for rank in range(world_size):
        state = ErrorFeedback(BlockInt8(BLOCK)).init(specs)
        state.rank, state.world_size, state.share = rank, world_size, 1 / world_size
        made.append(state)
    return made


def owners(state: State, keys: list[str]) -> dict[tuple[str, int], int]:
    """Owner of every block of every parameter, read off the plan of one bucket."""
    plan = block_plan(BLOCK, keys, state)
    owner_of_row = torch.repeat_interleave(torch.arange(state.world_size), torch.tensor(plan.splits))
    table = {}
    for key, start, shape in zip(keys, plan.starts, plan.shapes, strict=True):
        for i in range(-(-torch.Size(shape).numel() // BLOCK)):
            position = int((plan.order == start + i).nonzero())
            table[key, i] = int(owner_of_row[position])
    return table


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_block_has_one_owner_whatever_the_buckets(sizes: list[Any], world_size: int, random: Any) -> None:
    ranks = states(sizes, world_size)
    keys = [p.key for p in ranks[0].params]
    expected = owners(ranks[0], keys)
    blocks = {(p.key, i) for p in ranks[0].params for i in range(-(-p.numel // BLOCK))}
    assert expected.keys() == blocks, "every block is owned once"
    loads = [list(expected.values()).count(rank) for rank in range(world_size)]
    assert max(loads) - min(loads) <= 1, "and no rank owns more than its part"
    shuffled = keys[:]
    random.shuffle(shuffled)
    cut = random.randint(0, len(keys))
    for bucket in filter(None, (shuffled[:cut], shuffled[cut:])):
        for state in ranks:
            part = owners(state, bucket)
            assert part == {k: v for k, v in expected.items() if k[0] in bucket}


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5))
def test_owners_keep_room_for_exactly_the_blocks_they_own(sizes: list[Any], world_size: int) -> None:
    ranks = states(sizes, world_size)
    keys = [p.key for p in ranks[0].params]
    expected = owners(ranks[0], keys)
    for state in ranks:
        state.declare()
        for key in keys:
            mine = sum(owner == state.rank for (k, _), owner in expected.items() if k == key)
            assert state.arenas["owner_residual"].sizes[key] == mine * BLOCK


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 4))
def test_the_layout_gives_every_element_back(sizes: list[Any], world_size: int) -> None:
    (state, *_) = states(sizes, world_size)
    keys = [p.key for p in state.params]
    plan = block_plan(BLOCK, keys, state)
    blocks = torch.zeros(plan.rows, BLOCK)
    tensors = [torch.rand(p.shape) + 1 for p in state.params]
    for view, tensor in zip(plan.views(blocks), tensors, strict=True):
        view.copy_(tensor)
    assert int((blocks != 0).sum()) == sum(t.numel() for t in tensors), "no two parameters share a block's element"
    (moved,) = plan.restore([blocks.index_select(0, plan.order)])
    for view, tensor in zip(plan.views(moved), tensors, strict=True):
        assert torch.equal(view, tensor)
