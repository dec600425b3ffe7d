"""Private random numbers: the same on all ranks, the same after a resume, and never the global generator's."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator determined by `seed` and `key` alone, such as a parameter's name and a step."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def key_of(seed: int, *key: str | int) -> int:
    """A 62-bit number determined by `seed` and `key` alone."""
    return generator(seed, *key).initial_seed() >> 1


def draw(keys: Tensor, step: int) -> Tensor:
    """Uniform integers from 0 to 2^31 - 1, one per key, determined by key and step; on the keys' device.

    A counter-based generator: keys and step are mixed by multiplications and shifts (the finaliser of Steele et al.
    2014, SplitMix), so a step's numbers need no state, no loop, and no copy from the host.

    Args:
        keys: int64, of any shape; different keys give independent numbers.
        step: At least 0.
    """
    x = keys + _wrap(step * 0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _wrap(factor)
    return _shift_right(x ^ _shift_right(x, 31), 33)


def _wrap(number: int) -> int:
    """As a signed 64-bit number; products of those overflow as unsigned ones do."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _shift_right(x: Tensor, places: int) -> Tensor:
    """A logical shift; torch's is arithmetic."""
    return (x >> places).bitwise_and(2 ** (64 - places) - 1)
