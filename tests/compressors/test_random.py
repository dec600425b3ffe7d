"""Noise is a function of seed, step, name and place, and of nothing else."""

import hashlib
import math

import torch

from lightning_sync.compressors.random import generator, row_keys, row_streams, uniform


def noise(seed: int = 0, name: str = "w", rows: int = 4, step: int = 0, width: int = 64) -> torch.Tensor:
    keys = row_keys(row_streams(seed, [(name,)], [range(rows)]), step)
    return uniform(keys.unsqueeze(1), torch.arange(width, dtype=torch.int32).view(1, -1)).squeeze(1)


def test_it_is_the_same_again_and_another_elsewhere() -> None:
    first = noise()
    assert torch.equal(first, noise())
    for other in (noise(seed=1), noise(name="v"), noise(step=1), noise(step=2**40)):
        assert float((first == other).float().mean()) < 0.01
    assert torch.equal(noise(rows=9)[:4], first), "a row's noise does not depend on how many there are"


def reference(seed: int, name: str, row: int, step: int, place: int) -> float:
    """splitmix64's finaliser for the row, lowbias32 for the place, in Python's integers."""
    digest = hashlib.blake2b(repr((seed, name)).encode(), digest_size=8).digest()
    x = (int.from_bytes(digest, "little") >> 2) + row * 0xD1342543DE82EF95 + step * 0x9E3779B97F4A7C15
    x %= 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    low, high = x % 2**32, x >> 32
    y = (place * 0x9E3779B1 + low) % 2**32
    y = ((y ^ (y >> 16)) * 0x7FEB352D + high) % 2**32
    y = (y ^ (y >> 15)) * 0x846CA68B % 2**32
    y ^= y >> 16
    return (y >> 8) / 2**24


def test_it_is_of_this_definition_for_ever() -> None:
    """Another definition would change the bits of every run that goes on."""
    for seed, name, step in ((0, "w", 0), (7, "layers.0.weight", 123456), (2**31, "w[0:5]", 2**33)):
        found = noise(seed, name, rows=3, step=step, width=5)
        expected = [[reference(seed, name, row, step, place) for place in range(5)] for row in range(3)]
        assert found.tolist() == expected


def test_streams_of_several_names_stand_one_after_the_other() -> None:
    both = row_streams(3, [("a",), ("b", 1)], [range(2), [5]])
    assert torch.equal(both[:2], row_streams(3, [("a",)], [range(2)]))
    assert torch.equal(both[2:], row_streams(3, [("b", 1)], [range(6)])[5:])
    assert len(row_streams(3, [], [])) == 0


def test_it_is_uniform_and_uncorrelated() -> None:
    n = 2**20
    x = noise(rows=n // 256, width=256).double()
    assert 0 <= float(x.min()) <= float(x.max()) < 1
    sigma = 1 / math.sqrt(12 * n)
    assert abs(float(x.mean()) - 0.5) < 5 * sigma
    counts = torch.histc(x, 256, 0, 1)
    chi = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert abs(chi - 255) < 5 * math.sqrt(2 * 255)
    for step in (1, 2):  # the same rows a step later, and neighbours in a row and a column
        y = noise(rows=n // 256, width=256, step=step).double()
        assert abs(float(((x - 0.5) * (y - 0.5)).mean())) * 12 < 5 / math.sqrt(n)
    for a, b in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1])):
        assert abs(float(((a - 0.5) * (b - 0.5)).mean())) * 12 < 5 / math.sqrt(a.numel())
    low = (x * 2**24).to(torch.int64) & 1
    assert abs(float(low.double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(n)


def test_the_global_generator_plays_no_part() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    noise()
    generator(0, "w", 3)
    assert torch.equal(before, torch.get_rng_state())
