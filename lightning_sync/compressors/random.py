"""Private random numbers: the same on all ranks, the same after a resume, and never the global generator's."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator determined by `seed` and `key` alone, such as a parameter's name and a step."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
