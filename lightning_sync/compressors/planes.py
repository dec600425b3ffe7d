"""Blocks cut into planes, so that one small integer of every plane makes one machine word.

A block of `block` elements is cut into P planes of w = block / P elements; word j of the block holds element j of every
plane. Everything is then element-wise on whole vectors, where neighbours that share a word would need shuffles.

The planes of some blocks are given as a list of tensors ``[rows, p, w]`` whose p add up to P: as one tensor where
single operations run over it (eagerly), or as P tensors with p = 1 where a compiler fuses operations. Every function
here gives the same bits for both: what depends on an order has one that is written down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Planes = Sequence[Tensor]


def halves(planes: Planes) -> tuple[Planes, Planes]:
    """The first and the second half of the planes; their number must be even."""
    if len(planes) > 1:
        middle = len(planes) // 2
        return planes[:middle], planes[middle:]
    middle = planes[0].shape[1] // 2
    return [planes[0][:, :middle]], [planes[0][:, middle:]]


def fold(planes: Planes, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine P = 2^k planes by halves, ``[rows, 1, w]``: plane i with plane i + P/2, and so on."""
    while sum(p.shape[1] for p in planes) > 1:
        low, high = halves(planes)
        planes = [combine(a, b) for a, b in zip(low, high, strict=True)]
    return planes[0]


def peak(planes: Planes) -> Tensor:
    """Largest magnitude of every block, ``[rows, 1, 1]``; NaN if there is one."""
    sizes = [p.abs() for p in planes]
    together = sizes[0] if len(sizes) == 1 else fold(sizes, torch.maximum)  # a maximum does not depend on the order
    return together.amax((1, 2), keepdim=True)


def total(values: Planes) -> Tensor:
    """Sum of every block's values, none of them negative, ``[rows, 1, 1]``: the same bits in whatever order.

    Planes are added by halves. What is left, w partial sums v, is rounded to a common grid first: (v + b) - b for
    b = 2 w max(v) is a multiple of b's last place, and w such multiples add up below b, hence exactly. Each v moves by
    at most w 2^-23 max(v) in float32. Where b is beyond the dtype's range (3e38), the total is not finite.
    """
    partial = fold(values, torch.add)
    largest = partial.amax((1, 2), keepdim=True) * (2 * partial.shape[2])
    return ((partial + largest) - largest).sum((1, 2), keepdim=True)


def join(digits: Planes, bits: int, offset: int = 0) -> Tensor:
    """Make words, ``[rows, w]``, of P digits each.

    Args:
        digits: Integers from -offset to 2^bits - 1 - offset, as floating-point numbers.
        bits: Bits of a digit; P times `bits` is 8, 16 or 32, and the words are uint8, int16 or int32.
        offset: Added to every digit, so that none is negative.

    Digits grow together as floating-point numbers as long as those hold them exactly.
    """
    count = sum(d.shape[1] for d in digits)
    word = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[count * bits]
    whole = False
    while True:
        last = count == 1
        if not whole and (last or 2 * bits > 16):
            digits = [(d + float(offset) if offset else d).to(torch.int32) for d in digits]
            whole = True
        if last:
            return digits[0].to(word).squeeze(1)
        low, high = halves(digits)
        if whole:
            digits = [a | (b << bits) for a, b in zip(low, high, strict=True)]
        else:
            digits = [a + b * float(2**bits) for a, b in zip(low, high, strict=True)]
            offset += offset << bits
        bits, count = 2 * bits, count // 2


def split(words: Tensor, bits: int, like: Planes, offset: int = 0) -> list[Tensor]:
    """The digits that `join` put into `words`, ``[rows, w]``, as planes cut like `like`, in its dtype.

    Args:
        words: The words.
        bits: Bits of a digit.
        like: Planes, for their number, cut and dtype.
        offset: As for `join`: 0, or half of 2^bits.
    """
    count = sum(p.shape[1] for p in like)
    wide = words.to(torch.int32).unsqueeze(1)
    shifts = _shifts(like, bits, count)
    if not offset:
        return [((wide >> shift) & (2**bits - 1)).to(p.dtype) for p, shift in zip(like, shifts, strict=True)]
    # With every digit's highest bit turned over, digits are signed numbers, and shifting one up and down extends its
    # sign: that takes off the offset as well.
    wide = wide ^ _signed_word(offset, bits, count)
    top = 32 - bits
    return [((wide << (top - shift)) >> top).to(p.dtype) for p, shift in zip(like, shifts, strict=True)]


def positions(like: Planes) -> list[Tensor]:
    """Place of every element in its block, as planes ``[p, w]``, int32."""
    found, first = [], 0
    for p in like:
        count, width = p.shape[1:]
        found.append(torch.arange(first * width, (first + count) * width, dtype=torch.int32, device=p.device))
        first += count
    return [f.view(p.shape[1:]) for f, p in zip(found, like, strict=True)]


def _shifts(like: Planes, bits: int, count: int) -> list[int | Tensor]:
    """How far up in its word the digit of every plane sits: `join` puts planes i and i + P/2 next to each other."""
    places = _places(bits, count)
    return [*places] if len(like) == count else [_places_on(bits, count, like[0].device)]


@functools.cache
def _places(bits: int, count: int) -> tuple[int, ...]:
    levels = count.bit_length() - 1
    return tuple(bits * sum(((i >> k) & 1) << (levels - 1 - k) for k in range(levels)) for i in range(count))


@functools.cache
def _places_on(bits: int, count: int, device: torch.device) -> Tensor:
    return torch.tensor(_places(bits, count), dtype=torch.int32, device=device).view(-1, 1)


@functools.cache
def _signed_word(offset: int, bits: int, count: int) -> int:
    """A word of `count` digits that are all `offset`, as a signed number of 32 bits."""
    if offset != 1 << (bits - 1):
        raise ValueError(f"offset={offset}: expected 0 or {1 << (bits - 1)}, the highest bit of a digit.")
    word = sum(offset << (bits * i) for i in range(count))
    return word - 2**32 if word >= 2**31 else word
