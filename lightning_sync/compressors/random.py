"""Private random numbers: the same on all ranks, the same after a resume, and never the global generator's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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

    A counter-based generator: a step's numbers need no state, no loop, and no copy from the host.

    Args:
        keys: int64, of any shape; different keys give independent numbers.
        step: At least 0.
    """
    return _shift_right(_mixed(keys, step), 33)


def row_streams(seed: int, names: Sequence[tuple[str | int, ...]], rows: Sequence[Sequence[int]]) -> Tensor:
    """Where the noise of every row of some named tensors starts: ``[rows]``, int64, on the CPU.

    It depends on the seed, the name and the row's number only, so that what a tensor gets does not depend on what else
    is in its bucket.
    """
    starts = [
        key_of(seed, *name) + torch.tensor(own, dtype=torch.int64) * _ODD for name, own in zip(names, rows, strict=True)
    ]
    return torch.cat(starts) if starts else torch.zeros(0, dtype=torch.int64)


def row_keys(streams: Tensor, step: int) -> Tensor:
    """Two words of 32 bits for every row in this step, ``[rows, 2]``, int32."""
    return _mixed(streams, step).view(torch.int32).view(-1, 2)


def uniform(keys: Tensor, position: Tensor) -> Tensor:
    """Numbers uniform on the multiples of 2^-24 in [0, 1), float32: a function of row and place alone.

    Counter-based as `draw`, in 32 bits, so that it runs inside fused kernels: the place is spread by an odd constant
    and mixed with the two words of its row by the finaliser "lowbias32" (C. Wellons, 2018).

    Args:
        keys: ``[rows, 1, 2]``, from `row_keys`.
        position: Place in the row, ``[p, w]``, int32.
    """
    x = position * _wrap(0x9E3779B1, 32) + keys[..., :1]
    x = (x ^ _shift_right(x, 16)) * _wrap(0x7FEB352D, 32) + keys[..., 1:]
    x = (x ^ _shift_right(x, 15)) * _wrap(0x846CA68B, 32)
    x = x ^ _shift_right(x, 16)
    return _shift_right(x, 8).to(torch.float32) * 2.0**-24


def _mixed(keys: Tensor, step: int) -> Tensor:
    """Keys and step mixed by multiplications and shifts (the finaliser of Steele et al. 2014, SplitMix), int64."""
    x = keys + _wrap(step * 0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * _wrap(factor)
    return x ^ _shift_right(x, 31)


def _wrap(number: int, bits: int = 64) -> int:
    """As a signed number of so many bits; products of those overflow as unsigned ones do."""
    number &= 2**bits - 1
    return number - 2**bits if number >= 2 ** (bits - 1) else number


def _shift_right(x: Tensor, places: int) -> Tensor:
    """A logical shift; torch's is arithmetic."""
    return (x >> places).bitwise_and(2 ** (8 * x.element_size() - places) - 1)


_ODD = _wrap(0xD1342543DE82EF95)
"""Distance of two rows' streams; odd, so that all rows of a tensor differ."""
