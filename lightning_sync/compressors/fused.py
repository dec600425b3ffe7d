"""Block codecs whose arithmetic is written once, on planes, and runs fused where it can."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.compressors.base import Payload, Reduction
from lightning_sync.compressors.blocks import BlockCodec, BlockPlan, fade_, owner_residual, worker_residual
from lightning_sync.compressors.finite import forget_
from lightning_sync.compressors.kernels import Kernels, deliver, feed, kernels_for, kernels_in
from lightning_sync.compressors.layout import Layout, layout
from lightning_sync.compressors.planes import Planes
from lightning_sync.compressors.random import row_keys
from lightning_sync.state import ParamSpec, State

COMPILE_FROM = 2**22
"""Elements of all parameters together from which compiling pays: below, encoding takes a few milliseconds anyway."""

Code = tuple[Tensor, ...]


class FusedCodec(BlockCodec):
    """A block codec that defines its arithmetic on planes (see `planes`): two methods, and two facts.

    They run eagerly on pieces that fit the processor's cache, or compiled, to the same bits. Encoding is one pass over
    gradient and residual that adds, encodes and keeps the rest; decoding one that writes into the gradients.

    Attributes:
        planes: Into how many planes a block is cut, a power of two; `block` is a multiple of it.
        noisy: Whether `encode_planes` needs random numbers.
        keeps_zeros: Whether a zero is decoded as zero whatever else is in its block. If not, padding is kept at zero.
    """

    planes: int
    noisy: bool = False
    keeps_zeros: ClassVar[bool] = True

    @abstractmethod
    def encode_planes(self, values: Planes, keys: Tensor | None) -> tuple[Code, list[Tensor]]:
        """Encode blocks given as planes.

        Args:
            values: P planes ``[rows, p, w]``, not to be overwritten.
            keys: ``[rows, 1, 2]`` for `random.uniform`, where the codec is `noisy`.

        Returns:
            The code: words, ``[rows, w]``, and one number per block, ``[rows, 1]`` in float32, which is not finite if
            an element is not; and what it will be decoded to, as planes.
        """

    @abstractmethod
    def decode_planes(self, code: Code, like: Planes) -> list[Tensor]:
        """Decode `code` to planes cut like `like` and of its dtype."""

    @property
    @abstractmethod
    def word(self) -> torch.dtype:
        """Dtype of the words."""

    # ---- the codec by itself -----------------------------------------------------------------------------------------

    @override
    def encode(self, blocks: Tensor, keys: Tensor | None = None) -> Code:
        """Encode `blocks`, ``[rows, block]``; a noisy codec needs `keys`, ``[rows, 2]`` from `random.row_keys`."""
        return self.encode_(blocks.clone(), keys)

    @override
    def encode_(self, blocks: Tensor, keys: Tensor | None = None) -> Code:
        return feed(self, blocks, None, keys=keys)

    @override
    def decode(self, code: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels | None = None) -> Tensor:
        words, level = self.check_code(code)
        out = torch.empty(*words.shape[:-1], self.block, dtype=dtype, device=words.device)
        deliver(self, (words.flatten(0, -2), level.flatten(0, -2)), out.view(-1, self.block), kernels)
        return out

    def check_code(self, code: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Words and numbers of a code that came over the wire.

        Raises:
            ValueError: if it is not one of this codec.
        """
        width = self.block // self.planes
        kinds = [(t.dtype, t.shape[-1]) for t in code]
        if kinds != [(self.word, width), (torch.float32, 1)] or code[0].shape[:-1] != code[1].shape[:-1]:
            got = " and ".join(f"{t.dtype} {[*t.shape]}" for t in code)
            raise ValueError(
                f"{self!r}: expected a payload of {self.word} [..., {width}] and torch.float32 [..., 1], got {got}. "
                "All ranks must use the same compressor, and the same version of it."
            )
        return code[0], code[1]

    @override
    def row_bytes(self) -> int:
        return self.block // self.planes * self.word.itemsize + 4

    # ---- reductions --------------------------------------------------------------------------------------------------

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        state = super().init(params)
        if sum(p.numel for p in params) >= COMPILE_FROM and params[0].state_dtype == torch.float32:
            state.cache["kernels"] = kernels_for(self, params[0].device)
        return state

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        return (yield from self._reduce(keys, tensors, state, None))

    @override
    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        return (yield from self._reduce(keys, tensors, state, decay))

    def _reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float | None) -> Reduction:
        """Both ends of the two-phase reduction; without `decay` the rest is thrown away."""
        place = layout(keys, state, self.block, noisy=self.noisy, keeps_zeros=self.keeps_zeros)
        plan = place.plan
        if decay is None:
            rest = torch.zeros(plan.rows, self.block, dtype=plan.dtype, device=tensors[0].device)
        else:
            rest = worker_residual(self.block, keys, state)
        owned = yield Payload("exchange", self._send(rest, place, tensors, state, decay), plan.splits)
        combined = yield from self.combine_code(owned.tensors, plan, state)
        late = torch.zeros_like(combined) if decay is None else owner_residual(self.block, keys, state)
        everything = yield plan.gather(self._send_on(late, place, combined, state, decay))
        return self._deliver(everything.tensors, place, tensors, state)

    def combine_code(
        self, code: Sequence[Tensor], plan: BlockPlan, state: State
    ) -> Generator[Payload, Payload, Tensor]:
        """What the contributions ``[N, rows, ...]`` to the blocks of this rank become, ``[rows, block]``."""
        return (yield from state.aggregate(self.decode(code, plan.dtype, kernels_in(state)), plan.counts))

    def _send(self, kept: Tensor, place: Layout, tensors: Sequence[Tensor], state: State, decay: float | None) -> Code:
        """The code of what is kept and what is new, sorted by owner."""
        if state.left_out:
            kept = kept.clone()  # what is sent is read by nobody; the others wait for something of this size
        fade_(kept, 1.0 if decay is None else decay)
        keys = row_keys(place.streams[0], state.step) if self.noisy else None
        words = torch.empty(len(kept), self.block // self.planes, dtype=self.word, device=kept.device)
        code = words, torch.empty(len(kept), 1, dtype=torch.float32, device=kept.device)
        for first, last, fresh in place.read([t.reshape(-1) for t in tensors]):
            own = None if keys is None else keys[first:last]
            part = feed(self, kept[first:last], fresh, state.share, own, kernels_in(state))
            for ordered, found in zip(code, part, strict=True):
                ordered.index_copy_(0, place.plan.inverse[first:last], found)
        _forget_(kept, code[1].index_select(0, place.plan.inverse))
        self._clear(kept, place.padding[0])
        return code

    def _send_on(self, kept: Tensor, place: Layout, combined: Tensor, state: State, decay: float | None) -> Code:
        """The same of an owner's blocks."""
        fade_(kept, 1.0 if decay is None else decay)
        self._clear(combined, place.padding[1])
        keys = row_keys(place.streams[1], state.step) if self.noisy else None
        code = feed(self, kept, combined, 1.0, keys, kernels_in(state))
        _forget_(kept, code[1])
        self._clear(kept, place.padding[1])
        return code

    def _clear(self, blocks: Tensor, padding: Tensor) -> None:
        """Padding is zero, so that it neither counts as an element nor collects an error."""
        if not self.keeps_zeros:
            blocks.view(-1).index_fill_(0, padding, 0)

    def _deliver(
        self, code: Sequence[Tensor], place: Layout, tensors: Sequence[Tensor], state: State
    ) -> Sequence[Tensor]:
        """Decode what all owners sent into the gradients."""
        code = self.check_code(code)
        whole = [t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
        for first, last, out in place.write([t.view(-1) for t in whole]):
            rows = place.plan.inverse[first:last]
            deliver(self, tuple(t.index_select(0, rows) for t in code), out, kernels_in(state))
        for t, copy in zip(tensors, whole, strict=True):
            if copy is not t:
                t.copy_(copy)
        return tensors


def _forget_(kept: Tensor, level: Tensor) -> None:
    """A block with inf or NaN shows in the result once, and starts afresh."""
    forget_(kept, level.isfinite().view(-1))
