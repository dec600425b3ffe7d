"""Products of matrices with thin factors are what they should be, also in pieces and for gradients of any layout."""

from typing import Any

import pytest
import torch

from lightning_sync.compressors import lowrank


def case(count: int, n: int, m: int, rank: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(n + m + rank)
    matrices, left, right = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((count, n, m), (count, rank, n), (count, rank, m))
    )
    gradients = [torch.randn(n, m, generator=generator, dtype=torch.float64) for _ in range(count)]
    return matrices, gradients, left, right


@pytest.mark.parametrize("shape", [(1, 700, 500, 3), (3, 33, 17, 2), (2, 1, 9, 1), (1, 5, 300_000, 1)])
@pytest.mark.parametrize("subtract", [False, True])
def test_pieces_give_the_whole(shape: tuple[int, int, int, int], subtract: bool) -> None:
    matrices, gradients, left, right = case(*shape)
    updated = matrices + 0.25 * torch.stack(gradients)
    product = updated @ right.mT
    lowrank.add_and_project(matrices, gradients, 0.25, right, left, subtract=subtract)
    torch.testing.assert_close(left, product.mT, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(matrices, updated - product @ right if subtract else updated, rtol=1e-10, atol=1e-8)

    before = matrices.clone()
    back = left @ before
    lowrank.project_back(matrices, left, right, subtract=subtract)
    torch.testing.assert_close(right, back, rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(matrices, before - left.mT @ back if subtract else before, rtol=1e-10, atol=1e-6)

    lowrank.subtract_product_(matrices, left, right, 0.5)
    targets = [torch.full_like(g, torch.nan) for g in gradients]
    lowrank.write_product(left, right, targets)
    torch.testing.assert_close(torch.stack(targets), left.mT @ right, rtol=1e-10, atol=1e-8)


def test_means_reach_gradients_of_any_layout_and_dtype() -> None:
    _, _, left, right = case(4, 40, 30, 2)
    left, right = left.float(), right.float()
    targets = [
        torch.empty(40, 30),
        torch.empty(30, 40).mT,
        torch.empty(40, 30, dtype=torch.bfloat16),
        torch.empty(40, 5, 2, 3).to(memory_format=torch.channels_last),
    ]
    lowrank.write_product(left, right, targets)
    for target, p, q in zip(targets, left, right, strict=True):
        torch.testing.assert_close(target.reshape(40, 30), (p.mT @ q).to(target.dtype), rtol=1e-2, atol=1e-4)


def test_stacks_hold_every_matrix_once_by_shape() -> None:
    stacks = lowrank.stacks_of([(4, 6), (3, 2, 2), (4, 3, 2), (3, 4)])
    assert [(s.n, s.m, s.members, s.count) for s in stacks] == [(4, 6, (0, 2), 2), (3, 4, (1, 3), 2)]
