"""Parts of a model: every parameter in exactly one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sync.periodic.fragments import Fragments, check_fragments, split
from lightning_sync.testing import make_specs

MODEL = make_specs({"embed.weight": (64, 8), "blocks.0.w": (8, 8), "blocks.1.w": (8, 8), "head.weight": (8,)})


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.integers(1, 30))
def test_by_number_keeps_order_and_leaves_no_fragment_empty(sizes: list[int], number: int) -> None:
    params = make_specs({f"p{i}": (n,) for i, n in enumerate(sizes)})
    if number > len(sizes):
        with pytest.raises(ValueError, match="has only"):
            split(params, number)
        return
    parts = split(params, number)
    assert len(parts) == number
    assert all(parts)
    assert [p for part in parts for p in part] == list(params)


def test_by_number_is_about_even() -> None:
    params = make_specs({f"p{i}": (100,) for i in range(40)})
    assert [len(part) for part in split(params, 4)] == [10, 10, 10, 10]


def test_by_patterns() -> None:
    fragments: Fragments = [["embed*", "head*"], "blocks.*"]
    assert check_fragments(fragments) == 2
    names = [[p.name for p in part] for part in split(MODEL, fragments)]
    assert names == [["embed.weight", "head.weight"], ["blocks.0.w", "blocks.1.w"]]


@pytest.mark.parametrize(
    ("fragments", "text"),
    [
        (["embed*", "blocks.*"], "not in any: head.weight"),
        (["*", "blocks.*"], "in several: blocks.0.w, blocks.1.w"),
        (["*", "tail*"], r"matches nothing: \['tail\*'\]"),
    ],
)
def test_patterns_that_miss_or_repeat_a_parameter_are_refused(fragments: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        split(MODEL, fragments)
