"""Every built-in compressor keeps the whole contract, and the checker finds those that do not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors import (
    BF16,
    FP8,
    FP16,
    QSGD,
    AcpSGD,
    BlockInt4,
    BlockInt8,
    ChunkTopK,
    Compressor,
    ErrorFeedback,
    Exact,
    LocalClipping,
    MomentumCorrection,
    Payload,
    PlainBlocks,
    PowerSGD,
    RandomBlock,
    RatioWarmup,
    Reduction,
    Schedule,
    Sign,
    SignVote,
    dgc,
    registry,
)
from lightning_sync.compressors.random import generator
from lightning_sync.state import ParamSpec, State
from lightning_sync.testing import check_compressor

BUILT_IN: list[tuple[Compressor, dict[str, Any]]] = [
    (Exact(), {}),
    (BF16(), {}),
    (FP16(), {}),
    (BlockInt8(), {}),
    (PlainBlocks(), {}),
    (PlainBlocks(block=8, dtype=torch.bfloat16), {}),
    (BlockInt8(block=24), {}),
    (ErrorFeedback(BlockInt8()), {}),
    (ErrorFeedback(BlockInt8(block=64)), {}),
    (ErrorFeedback(BlockInt8(), decay=0.9), {"telescopes": False}),
    (BlockInt8(stochastic=True), {}),
    (BlockInt4(), {}),
    (BlockInt4(block=40, stochastic=True), {}),
    (ErrorFeedback(BlockInt4()), {}),
    (ErrorFeedback(BlockInt4(stochastic=True)), {}),
    (FP8(), {}),
    (ErrorFeedback(FP8(block=24)), {}),
    (QSGD(), {}),
    (QSGD(bits=2, block=48), {}),
    (QSGD(bits=8), {}),
    (Sign(), {}),
    (Sign(block=72), {}),
    (ErrorFeedback(Sign()), {}),
    (ErrorFeedback(Sign(block=64), decay=0.9), {"telescopes": False}),
    (SignVote(), {}),
    (Schedule([(0, "none"), (3, ErrorFeedback(BlockInt4()))]), {}),
    (
        Schedule([(0, ErrorFeedback(BlockInt8())), (2, ErrorFeedback(Sign(block=64))), (4, PowerSGD(2, 0))]),
        {"bitwise_buckets": False},
    ),
    (PowerSGD(), {}),
    (PowerSGD(rank=2, warmup_steps=0), {}),
    (PowerSGD(rank=1, warmup_steps=0, residual="aggregate"), {}),
    (
        PowerSGD(rank=8, warmup_steps=0, min_ratio=1),
        {"shapes": {"long": (4, 2000), "tall": (2000, 4), "square": (64, 64)}},
    ),
    (AcpSGD(), {}),
    (AcpSGD(rank=2, warmup_steps=3), {}),
    (ChunkTopK(), {}),
    (ErrorFeedback(ChunkTopK()), {}),
    (ErrorFeedback(ChunkTopK(0.1, 64, "bf16")), {}),
    (ErrorFeedback(ChunkTopK(0.1, 64, "int8", "gather")), {}),
    (ErrorFeedback(ChunkTopK(0.1, 300, "2bit", recall=1)), {}),
    (ErrorFeedback(ChunkTopK(1 / 64, 64, "2bit", "gather"), decay=0.95), {"telescopes": False}),
    (RandomBlock(0.3, 16), {}),
    (RandomBlock(0.3, 16, BlockInt8(8), unbiased=True), {}),
    (ErrorFeedback(RandomBlock(0.3, 16)), {}),
    (ErrorFeedback(RandomBlock(0.3, 33, BlockInt8(16))), {}),
    (ErrorFeedback(RandomBlock(0.3, 64, ChunkTopK(0.2, 64, pattern="gather"))), {}),
    (ErrorFeedback(RandomBlock(0.3, 64, BF16())), {"telescopes": False}),  # what a cast rounds off is not kept
    (dgc(), {"telescopes": False}),  # momentum delivers more than the gradient
    (MomentumCorrection(ChunkTopK(0.1, 64), momentum=0), {}),
    (MomentumCorrection(RandomBlock(0.3, 64, BlockInt8(16))), {"telescopes": False}),
    (ErrorFeedback(RatioWarmup(RandomBlock(0.01, 16))), {}),
    (LocalClipping(ErrorFeedback(ChunkTopK(0.1, 64)), max_norm=1e6), {}),
    (ErrorFeedback(LocalClipping(ChunkTopK(0.1, 64))), {"telescopes": False}),
]


@pytest.mark.parametrize(("compressor", "options"), BUILT_IN, ids=[repr(c) for c, _ in BUILT_IN])
def test_built_in_compressors_keep_the_contract(compressor: Compressor, options: dict[str, Any]) -> None:
    check_compressor(compressor, **options)


def test_every_registered_name_is_checked() -> None:
    checked = {type(c) for c, _ in BUILT_IN}
    assert {type(registry.build(name)) for name in registry} <= checked


# ---- a third party's compressor, and what can be wrong with one


@dataclass(frozen=True)
class EveryOther(Compressor):
    """Sends every second element, the odd and the even ones in turn, and keeps what it has not sent."""

    alignment: ClassVar[int | None] = None

    def init(self, params: Sequence[ParamSpec]) -> State:
        state = State(tuple(params))
        state.arena("residual", {p.key: p.numel for p in params}, params[0].state_dtype, params[0].device)
        return state

    def accepts(self, param: ParamSpec) -> bool:
        return param.numel >= 2

    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        phase = state.step % 2
        residual = state.arenas["residual"].bind(keys).split([t.numel() for t in tensors])
        for kept, t in zip(residual, tensors, strict=True):
            kept.add_(t.reshape(-1), alpha=state.share)
        flat = torch.cat([kept[phase::2] for kept in residual])
        reduced = (yield Payload("sum", (flat,))).tensors[0]
        for kept, t, part in zip(residual, tensors, reduced.split([len(k[phase::2]) for k in residual]), strict=True):
            out = torch.zeros_like(kept)
            out[phase::2] = part
            kept[phase::2] = 0
            t.copy_(out.view(t.shape))
        return tensors

    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        phase = (step or 0) % 2
        return topology.all_reduce(sum(len(range(phase, p.numel, 2)) * p.state_dtype.itemsize for p in params))


class _Broken(EveryOther):
    """Base of what the checker must find; each subclass breaks one promise."""

    says: ClassVar[str]


class ForgetsShare(_Broken):
    says = "must be the mean"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        return (yield from super().reduce(keys, tensors, replace(state, share=1.0)))


class DifferentBits(_Broken):
    says = "ranks got different bits"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        result = yield from super().reduce(keys, tensors, state)
        return [t + state.rank for t in result]


class WrongBytes(_Broken):
    says = "wire_bytes predicts"

    def wire_bytes(self, params: Any, topology: Topology, step: int | None = None) -> Bytes:
        return topology.all_reduce(sum(p.numel * p.state_dtype.itemsize for p in params))


class LosesResidual(_Broken):
    says = "miss the true sum"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        result = yield from super().reduce(keys, tensors, state)
        state.arenas["residual"].bind(keys).mul_(0.5)
        return result


class HidesOverflow(_Broken):
    says = "an overflow must stay visible"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        return (yield from super().reduce(keys, [t.nan_to_num(0, 0, 0) for t in tensors], state))


class GlobalRandomness(_Broken):
    says = "gave another payload"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        return (
            yield from super().reduce(keys, [t * (1 + 0.1 * torch.rand((), dtype=t.dtype)) for t in tensors], state)
        )


class ChangesDtype(_Broken):
    says = "came out as"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        result = yield from super().reduce(keys, tensors, state)
        return [t.double() for t in result]


class StateOutsideArenas(_Broken):
    says = "resumed from state_dict"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        for t, k in zip(tensors, keys, strict=True):
            old = state.cache.get(k)
            state.cache[k] = t.clone()
            if isinstance(old, Tensor):
                t.add_(old, alpha=0.1)
        return (yield from super().reduce(keys, tensors, state))


class BelongsToBuckets(_Broken):
    says = "state belongs to parameters"

    def reduce(self, keys: Any, tensors: Any, state: State) -> Reduction:
        scale = 1 + float(torch.rand((), generator=generator(0, *keys)))
        return (yield from super().reduce(keys, [t * scale for t in tensors], state))


BROKEN = [
    ForgetsShare,
    DifferentBits,
    WrongBytes,
    LosesResidual,
    HidesOverflow,
    GlobalRandomness,
    ChangesDtype,
    StateOutsideArenas,
    BelongsToBuckets,
]


def test_a_third_partys_compressor_passes() -> None:
    check_compressor(EveryOther())


@pytest.mark.parametrize("broken", BROKEN, ids=lambda c: c.__name__)
def test_the_checker_says_which_promise_is_broken(broken: type[_Broken]) -> None:
    with pytest.raises(AssertionError, match=broken.says):
        check_compressor(broken())


def test_hyper_parameters_must_be_frozen() -> None:
    class Loose(EveryOther):
        __dataclass_params__ = type("P", (), {"frozen": False})

    with pytest.raises(AssertionError, match="frozen dataclass"):
        check_compressor(Loose())


def test_a_checker_that_checks_nothing_says_so() -> None:
    with pytest.raises(AssertionError, match="accepts none of the shapes"):
        check_compressor(PowerSGD(rank=64))
    with pytest.raises(ValueError, match="world_sizes"):
        check_compressor(Exact(), world_sizes=(5,))
