"""The hash behind the drift alarm, and what it says about ranks that differ."""

import pytest
import torch

from lightning_sync.drift import DriftError, Hasher, first_difference

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn),
]


def random(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits, so with NaN among them."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return (raw & 1).bool() if dtype == torch.bool else raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 16_384, 70_001])
def test_any_single_bit_of_any_element_changes_the_hash(dtype: torch.dtype, numel: int) -> None:
    tensor = random(numel, dtype)
    hasher = Hasher(numel)
    before = int(hasher(tensor))
    assert int(hasher(tensor.clone())) == before
    generator = torch.Generator().manual_seed(1)
    raw = tensor.view(torch.uint8)
    for _ in range(30):
        place = int(torch.randint(len(raw), (1,), generator=generator))
        bit = 1 if dtype == torch.bool else 1 << int(torch.randint(8, (1,), generator=generator))
        raw[place] ^= bit
        assert int(hasher(tensor)) != before, (place, bit)
        raw[place] ^= bit
    assert int(hasher(tensor)) == before, "NaN included"


def test_elements_that_changed_places_show_and_so_do_two_flipped_signs() -> None:
    tensor = random(50_000, torch.float32)
    hasher = Hasher(50_000)
    before = int(hasher(tensor))
    generator = torch.Generator().manual_seed(2)
    for _ in range(300):
        a, b = torch.randint(50_000, (2,), generator=generator).tolist()
        other = tensor.clone()
        other[a], other[b] = tensor[b], tensor[a]
        if not torch.equal(other.view(torch.int32), tensor.view(torch.int32)):
            assert int(hasher(other)) != before, (a, b)
        if a != b:
            other = tensor.clone()
            other.view(torch.int32)[[a, b]] ^= -(2**31)
            assert int(hasher(other)) != before, (a, b)


def test_the_hash_follows_logical_order_not_memory() -> None:
    tensor = torch.randn(4, 3, 5, 5)
    assert int(Hasher(300)(tensor)) == int(Hasher(300)(tensor.to(memory_format=torch.channels_last)))
    assert int(Hasher(300)(torch.zeros(0))) == 0
    assert Hasher(1)(torch.tensor(1.0)).shape == ()


def test_rows_that_changed_places_show() -> None:
    tensor = torch.randn(4, 2**14)
    assert int(Hasher(2**16)(tensor)) != int(Hasher(2**16)(tensor[[1, 0, 2, 3]]))


@pytest.mark.parametrize(
    ("rows", "name", "odd", "others"),
    [
        ([[1, 2, 3], [1, 2, 3], [1, 2, 4]], "c", (2,), 0),
        ([[1, 9, 9], [1, 2, 3], [1, 2, 3]], "b", (0,), 1),
        ([[1, 2, 3], [0, 2, 3]], "a", (1,), 0),
    ],
)
def test_the_error_names_the_first_tensor_and_the_ranks_that_differ_from_most(
    rows: list[list[int]], name: str, odd: tuple[int, ...], others: int
) -> None:
    error = first_difference(["a", "b", "c"], [4, 5, 6][: len(rows)], torch.tensor(rows), 200)
    assert isinstance(error, DriftError)
    assert (error.name, error.ranks, error.others, error.step) == (name, tuple(4 + r for r in odd), others, 200)
    assert repr(name) in str(error)
    assert "drift_check_every=0" in str(error)


def test_equal_rows_are_no_drift() -> None:
    assert first_difference(["a"], [0, 1], torch.tensor([[5], [5]]), 1) is None
