"""Casts: divide, cast, sum; and what a 16-bit format cannot hold is said, not hidden."""

import pytest
import torch
from torch import Tensor

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import BF16, FP16, Compressor
from lightning_sync.testing import make_specs

SHAPES = {"w": (30, 7), "b": (30,)}


@pytest.mark.parametrize(("compressor", "wire"), [(BF16(), torch.bfloat16), (FP16(), torch.float16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_divide_cast_and_sum_in_that_order(compressor: Compressor, wire: torch.dtype, dtype: torch.dtype) -> None:
    gradients = [[torch.randn(s).to(dtype) for s in SHAPES.values()] for _ in range(3)]
    world = SimulatedWorld(compressor, make_specs(SHAPES, dtype), 3, record=True)
    results = world.reduce(gradients)
    (sent,) = world.sent
    assert {t.dtype for p in sent for t in p.tensors} == {wire}
    for i, out in enumerate(results[0]):
        divided = [(mine[i] * (1 / 3)).to(wire) for mine in gradients]
        assert torch.equal(out, torch.stack(divided).sum(0).to(dtype))


@pytest.mark.parametrize(("compressor", "bits"), [(BF16(), 8), (FP16(), 11)])
def test_one_rank_is_rounded_once(compressor: Compressor, bits: int) -> None:
    gradient = torch.rand(1000, dtype=torch.float64) + 0.01
    (out,) = SimulatedWorld(compressor, make_specs({"w": (1000,)}, torch.float64), 1).reduce([[gradient]])[0]
    assert float(((out - gradient) / gradient).abs().max()) <= 2.0**-bits


def reduce_fp16(*values: float) -> list[Tensor]:
    world = SimulatedWorld(FP16(), make_specs({"good": (2, 3), "too.large": (4,)}), len(values))
    results = world.reduce([[torch.ones(2, 3), torch.full((4,), v)] for v in values])
    return [mine[1] for mine in results]


def test_fp16_divides_first_so_a_large_value_on_one_rank_survives() -> None:
    for result in reduce_fp16(1e5, 0.0):
        assert result.tolist() == pytest.approx([5e4] * 4, rel=1e-3)


@pytest.mark.parametrize("values", [(7e4, 7e4), (1.4e5, 0.0), (float("inf"), 0.0), (float("nan"), 0.0)])
def test_fp16_names_the_parameter_whose_mean_does_not_fit(values: tuple[float, ...]) -> None:
    with pytest.raises(OverflowError, match=r"'too\.large' is not finite in float16.*65504.*bf16") as caught:
        reduce_fp16(*values)
    assert "good" not in str(caught.value)


def test_bf16_has_the_range_of_float32() -> None:
    world = SimulatedWorld(BF16(), make_specs({"w": (4,)}), 2)
    (out,) = world.reduce([[torch.full((4,), 1e38)]] * 2)[0]
    assert out.tolist() == pytest.approx([1e38] * 4, rel=1e-2)
