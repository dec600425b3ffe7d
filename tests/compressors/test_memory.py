"""What a reduction holds beside gradients and residual: its payloads, and one scratch of the size of the bucket."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sync.compressors import FP8, BlockInt4, BlockInt8, Compressor, ErrorFeedback, Payload, Sign
from lightning_sync.testing import make_specs

RANKS = 4
SHAPES = {"a": (1500, 1000), "b": (1001, 333), "c": (1000, 256)}


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given | self.known:
                self._begin(t)
        return result

    def _begin(self, tensor: Tensor) -> None:
        key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def end() -> None:
            self.known.discard(key)
            self.now -= size

        weakref.finalize(tensor.untyped_storage(), end)


def peak_bytes(compressor: Compressor) -> tuple[int, int, int]:
    """Most bytes held at a time in a third step, while one rank of four encodes, and later; bytes of its payload."""
    specs = make_specs(SHAPES)
    state = compressor.init(specs)
    state.world_size, state.share = RANKS, 1 / RANKS
    gradients = [torch.randn(p.shape) for p in specs]
    keys = [p.key for p in specs]
    payload = 0
    for _ in range(2):
        run = compressor.reduce(keys, gradients, state)
        sent = next(run)
        payload = sum(t.nbytes for t in sent.tensors)
        sent = run.send(_answer(sent))
        with pytest.raises(StopIteration):
            run.send(_answer(sent))
    run = compressor.reduce(keys, gradients, state)
    with Live() as encoding:
        sent = next(run)
    owned = _answer(sent)
    with Live() as owning:
        sent = run.send(owned)
    everything = _answer(sent)
    with Live() as decoding, pytest.raises(StopIteration):
        run.send(everything)
    return encoding.peak, max(owning.peak, decoding.peak), payload


def _answer(payload: Payload) -> Payload:
    if payload.pattern == "exchange":
        parts = [t[: payload.splits[0]] for t in payload.tensors]
        return Payload("exchange", tuple(torch.stack([p] * RANKS) for p in parts), payload.splits)
    rows = sum(payload.splits)
    return Payload("gather", tuple(t.repeat(RANKS + 1, 1)[:rows] for t in payload.tensors), payload.splits)


@pytest.mark.parametrize("codec", [BlockInt8(), BlockInt4(), FP8(), Sign()], ids=repr)
def test_beside_the_residual_there_is_a_payload_and_one_scratch(codec: Any) -> None:
    bucket = sum(4 * p.numel for p in make_specs(SHAPES))
    pieces = 8 * 2**20  # intermediate results of half a MiB, and small or ragged parameters in a copy
    encoding, later, payload = peak_bytes(ErrorFeedback(codec))
    assert 0 < payload < bucket / 3
    assert encoding <= payload + pieces
    assert later <= bucket + bucket // RANKS + payload + pieces
