"""Which elements of a row are largest in magnitude: found by maxima of groups, which cost a fifth of sorting."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 2**21
"""Size of the pieces that are worked on at a time on the CPU: between its passes a piece stays in the cache."""

LARGEST_GROUP = 64


def group_size(k: int, width: int, recall: float) -> int:
    """The largest power of two for which groups of this size find `recall` of the `k` largest of `width` elements.

    One element of every group is a candidate. With L = width/group groups, and largest elements that lie anywhere, the
    expected share of them that is found is ``L/k (1 - (1 - 1/L)^k)``.
    """
    best, group = 1, 2
    while group <= LARGEST_GROUP and width % group == 0 and width // group >= k:
        groups = width // group
        if groups / k * (1 - (1 - 1 / groups) ** k) >= recall:
            best = group
        group *= 2
    return best


def largest(rows: Tensor, k: int, group: int) -> Tensor:
    """Places of the `k` largest magnitudes of every row, ``[n, k]``, int64, in no particular order.

    With groups of 1 they are exactly that. Else columns c, c + width/group, c + 2 width/group, ... of a row are a
    group, the largest element of every group is a candidate, and the k largest candidates are taken: in squares never
    less than k/width of the row. So that a maximum tells its place as well, the place is written over the lowest
    log2(width) bits of the number: in float32, magnitudes that differ by less than width/2^23 of themselves (0.05 % at
    4096) count as equal. NaN is larger than inf, and inf than all others.

    Args:
        rows: ``[n, width]``, float32 or float64, contiguous; n may be 0.
        k: At most width/group.
        group: A divisor of the width.
    """
    # The bits of a positive float order as integers do; clearing the sign takes the magnitude.
    width = rows.shape[1]
    dtype = {4: torch.int32, 8: torch.int64}[rows.element_size()]
    bits = rows.view(dtype)
    magnitude = torch.iinfo(dtype).max
    if group == 1:
        return (bits & magnitude).topk(k, 1, sorted=False).indices
    marks = (1 << (width - 1).bit_length()) - 1
    columns = width // group
    place = torch.arange(width, dtype=dtype, device=rows.device)
    candidates = torch.empty(len(rows), columns, dtype=dtype, device=rows.device)
    step = max(1, PIECE_BYTES // (width * rows.element_size())) if rows.device.type == "cpu" else max(1, len(rows))
    scratch = torch.empty(min(step, len(rows)), width, dtype=dtype, device=rows.device)
    for start in range(0, len(rows), step):
        piece = bits[start : start + step]
        work = scratch[: len(piece)]
        torch.bitwise_and(piece, magnitude & ~marks, out=work).bitwise_or_(place)
        torch.amax(work.view(-1, group, columns), 1, out=candidates[start : start + step])
    return (_top(candidates, k) & marks).long()


def _top(rows: Tensor, k: int) -> Tensor:
    """The k largest values of every row."""
    if k == rows.shape[1]:
        return rows
    if rows.device.type == "cpu":  # a quarter of the time of torch.topk, which keeps track of places as well
        values = rows.numpy()
        values.partition(rows.shape[1] - k, axis=1)
        return rows[:, -k:]
    return rows.topk(k, 1, sorted=False).values
