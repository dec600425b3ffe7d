"""The largest elements of every chunk: sparse gradients with messages of a fixed size and short indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.checks import check_choice, check_integer
from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Payload, Reduction
from lightning_sync.compressors.blocks import BlockCodec, BlockPlan, block_plan, fade_, worker_residual
from lightning_sync.compressors.finite import forget_
from lightning_sync.compressors.flat import span
from lightning_sync.compressors.largest import group_size, largest
from lightning_sync.compressors.values import FORMATS
from lightning_sync.state import ParamSpec, State


@dataclass(frozen=True)
class ChunkTopK(BlockCodec):
    r"""Send the largest elements of every chunk, with their places.

    With x a chunk of `chunk` elements and S the places of its :math:`k = \max(1, \mathrm{round}(ratio \cdot chunk))`
    largest magnitudes (as far as `recall` asks for them), :math:`C(x)_i = Q(x_i)` for i in S and 0 elsewhere. Chunks do
    not cross parameters. Q is the format of the values: ``"fp32"`` sends them as they are; ``"bf16"`` rounds;
    ``"int8"`` has one scale per chunk, and errors of at most max|x| / 254; ``"2bit"`` sends a sign and one of two
    magnitudes per chunk, each the mean of the values it stands for. With `ErrorFeedback` over the differences of
    `HybridStrategy`, ``"2bit"`` and a `decay` below 1 this is SparseLoCo's compressor (Sarfi et al. 2025,
    arXiv 2508.15706; its own quantiser may differ). (Aji and Heafield 2017; Stich et al. 2018.)

    Biased. Contraction: :math:`\|C(x) - x\|^2 \le (1 - k/chunk) \|x\|^2` with ``"fp32"``, whatever the recall;
    :math:`1 - 1/chunk` with ``"2bit"``. Gradients are far from this worst case. Error feedback is wrapped around it by
    default.

    Payload per chunk: k indices, of 1 byte each up to chunks of 256 and of 2 above, and the values: ``4 k`` (fp32),
    ``2 k`` (bf16), ``k + 4`` (int8) or ``ceil(k/4) + 8`` (2bit) bytes. With the defaults 246 bytes per 4096 elements,
    1.5 % of float32; with 2bit 101, 0.6 %.

    * ``pattern="exchange"``: chunks have owners, which add up what they get, take the k largest again and send them to
      all: each rank sends 2 (N-1)/N payloads, whatever N is, and k elements of every chunk arrive.
    * ``pattern="gather"``: all get everything: each rank sends N-1 payloads, and up to N k elements arrive.

    At N = 2 both send the same; with more ranks the exchange sends less, the gather N/2 times as much. Gathered, 1 % of
    the gradient in fp32 sends more than a bf16 ring from N = 67. With g ranks on each node, g times that crosses a
    network interface, unless the reduction has two levels (the default then): exact inside a node, and once per node.

    Memory: one float32 per element (residual), and 1/N more for the chunks a rank owns with ``"exchange"``. Time on one
    core of a CPU: about 4 copies of the gradient.

    Args:
        ratio: Share of the elements that is sent, in (0, 1]. Lower: fewer bytes, more of the gradient late.
        chunk: Elements that compete with each other, 8 to 32768. Larger: more freedom for large elements to crowd
            together; up to 256 an index takes one byte.
        values: Format of the values. Fewer bits: fewer bytes, larger errors in what is sent.
        pattern: How payloads travel, see above.
        recall: Share of the k largest that must be found on average, in (0, 1]. 1: exactly the k largest. Lower:
            less work (0.9 took a fifth of the time of 1), as maxima of groups are candidates instead of all elements;
            the contraction above holds for any.

    Raises:
        ValueError: for a value out of range.
    """

    ratio: float = 0.01
    chunk: int = 4096
    values: Literal["fp32", "bf16", "int8", "2bit"] = "fp32"
    pattern: Literal["exchange", "gather"] = "exchange"
    recall: float = 0.9
    biased: ClassVar[bool] = True
    aggregates: ClassVar[bool] = False  # an element that a rank did not send would count as its zero

    def __post_init__(self) -> None:
        check_integer("ChunkTopK", 8, chunk=self.chunk)
        if self.chunk > 32768:
            raise ValueError(f"ChunkTopK(chunk={self.chunk!r}): expected at most 32768, so that indices stay short.")
        check_ratio("ChunkTopK", ratio=self.ratio, recall=self.recall)
        check_choice("ChunkTopK", tuple(FORMATS), values=self.values)
        check_choice("ChunkTopK", ("exchange", "gather"), pattern=self.pattern)

    @property
    def k(self) -> int:
        """Elements sent of every chunk."""
        return max(1, round(self.ratio * self.chunk))

    @property
    def block(self) -> int:  # type: ignore[override]
        """A chunk is a block."""
        return self.chunk

    @override
    def encode(self, blocks: Tensor) -> tuple[Tensor, ...]:
        index = self._choose(blocks)
        return self._short(index), *FORMATS[self.values].encode(blocks.gather(1, index))

    @override
    def encode_(self, blocks: Tensor) -> tuple[Tensor, ...]:
        index = self._choose(blocks)
        chosen = blocks.gather(1, index)
        code = FORMATS[self.values].encode(chosen)
        blocks.scatter_(1, index, chosen - self._values(code, blocks.dtype))
        return self._short(index), *code

    @override
    def encode_rest_(self, blocks: Tensor) -> tuple[Tensor, ...]:
        # What is not finite is larger than anything else: it is enough to look at what was chosen.
        index = self._choose(blocks)
        chosen = blocks.gather(1, index)
        code = FORMATS[self.values].encode(chosen)
        rest = chosen - self._values(code, blocks.dtype)
        blocks.scatter_(1, index, rest)
        forget_(blocks, rest.isfinite().all(1))
        return self._short(index), *code

    @override
    def decode(self, code: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        values = self._values(code[1:], dtype)
        return values.new_zeros(*values.shape[:-1], self.chunk).scatter_(-1, code[0].long(), values)

    @override
    def row_bytes(self) -> int:
        return self.k * self._index_dtype.itemsize + FORMATS[self.values].nbytes(self.k)

    @override
    def remember(self, state: State) -> None:
        super().remember(state)
        if self.pattern == "gather":  # nobody owns anything
            del state.lazy["owner_residual"], state.undelivered["owner_residual"]

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        if self.pattern == "exchange":
            return (yield from super().reduce(keys, tensors, state))
        plan = block_plan(self.chunk, keys, state)
        blocks = torch.zeros(plan.rows, self.chunk, dtype=plan.dtype, device=tensors[0].device)
        torch._foreach_add_(plan.views(blocks), list(tensors), alpha=state.share)
        return (yield from self._gather(self.encode(blocks), plan, tensors, state))

    @override
    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        if self.pattern == "exchange":
            return (yield from super().reduce_late(keys, tensors, state, decay))
        plan = block_plan(self.chunk, keys, state)
        residual = worker_residual(self.chunk, keys, state)
        fade_(residual, decay)
        torch._foreach_add_(plan.views(residual), list(tensors), alpha=state.share)
        return (yield from self._gather(self.encode_rest_(residual), plan, tensors, state))

    @override
    def write(self, code: Sequence[Tensor], plan: BlockPlan, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._write([code], plan, tensors)

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        if self.pattern == "exchange":
            return super().wire_bytes(params, topology, step)
        return topology.all_gather(sum(-(-p.numel // self.chunk) for p in params) * self.row_bytes())

    def _gather(self, code: Sequence[Tensor], plan: BlockPlan, tensors: Sequence[Tensor], state: State) -> Reduction:
        n = state.world_size
        everything = yield Payload("gather", tuple(code), (plan.rows,) * n)
        ranks = zip(*(t.view(n, plan.rows, *t.shape[1:]).unbind(0) for t in everything.tensors), strict=True)
        return self._write(list(ranks), plan, tensors)

    def _write(self, codes: Sequence[Sequence[Tensor]], plan: BlockPlan, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Write the sum of some ranks' codes into the gradients: zeros, and an addition where something was sent."""
        flat, starts = span(tensors)
        if flat is None or flat.dtype != plan.dtype:
            dense = torch.zeros(plan.rows, self.chunk, dtype=plan.dtype, device=tensors[0].device)
            for code in codes:
                dense.scatter_add_(1, code[0].long(), self._values(code[1:], plan.dtype))
            return plan.write(dense, tensors)
        torch._foreach_zero_(list(tensors))
        first, last = plan.places(starts)
        for code in codes:  # one after the other: places repeat between ranks, and sums must have one order everywhere
            # Padding is beyond the end of a parameter, and zero: it may be added anywhere.
            place = torch.minimum(code[0].long().add_(first), last)
            flat.index_add_(0, place.view(-1), self._values(code[1:], plan.dtype).view(-1))
        return tensors

    def _choose(self, blocks: Tensor) -> Tensor:
        return largest(blocks, self.k, group_size(self.k, self.chunk, self.recall))

    def _values(self, code: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return FORMATS[self.values].decode(code, self.k, dtype)

    @property
    def _index_dtype(self) -> torch.dtype:
        return torch.uint8 if self.chunk <= 256 else torch.int16

    def _short(self, index: Tensor) -> Tensor:
        return index.to(self._index_dtype)


def check_ratio(owner: str, **values: object) -> None:
    """Each is a number in (0, 1]."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1 or math.isnan(value):
            raise ValueError(f"{owner}({name}={value!r}): expected a number in (0, 1].")
