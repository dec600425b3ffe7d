"""Clipping one rank's own gradient by its global norm."""

import pytest
import torch
from torch import nn

import lightning_sync as ls
from lightning_sync.clipping import clip_


@pytest.mark.parametrize("unit", [1.0, 4.0, torch.tensor(0.25)])
def test_it_is_what_torch_does_in_the_units_that_are_asked_for(unit: float) -> None:
    layer = nn.Linear(5, 3)
    for p in layer.parameters():
        p.grad = torch.randn_like(p)
    own = [p.grad.clone() for p in layer.parameters()]
    for p in layer.parameters():
        p.grad *= unit
    nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
    clip_(own, 0.5, unit)
    assert all(torch.allclose(g * unit, p.grad) for g, p in zip(own, layer.parameters(), strict=True))


def test_small_gradients_dtypes_and_nothing_at_all() -> None:
    small = [torch.full((3,), 1e-3), torch.full((2,), 1e-3, dtype=torch.bfloat16)]
    before = [t.clone() for t in small]
    clip_(small, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(small, before, strict=True))
    large = [t * 1e6 for t in small]
    clip_(large, 1.0)
    assert [t.dtype for t in large] == [torch.float32, torch.bfloat16]
    assert float(torch.cat([t.double() for t in large]).norm()) == pytest.approx(1, rel=1e-2)
    clip_([], 1.0)


@pytest.mark.parametrize("value", [0, -1.0, True])
def test_a_norm_is_above_zero(value: float) -> None:
    with pytest.raises(ValueError, match="local_clip_norm="):
        ls.StrictStrategy(local_clip_norm=value)


def test_it_does_not_go_with_a_hook_that_sees_one_bucket_at_a_time() -> None:
    with pytest.raises(ValueError, match=r"local_clip_norm=1.0 does not go with ddp_comm_hook"):
        ls.StrictStrategy(local_clip_norm=1.0, ddp_comm_hook=lambda state, bucket: None)
