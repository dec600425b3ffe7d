"""One bit per element: signs, and one magnitude per block."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sync.compressors.base import Payload
from lightning_sync.compressors.blocks import BlockPlan
from lightning_sync.compressors.fused import Code, FusedCodec
from lightning_sync.compressors.integers import check_block
from lightning_sync.compressors.kernels import kernels_in
from lightning_sync.compressors.planes import Planes, join, split, total
from lightning_sync.state import State


@dataclass(frozen=True)
class Sign(FusedCodec):
    r"""Signs, eight to a byte, times the mean magnitude of their block (Karimireddy et al. 2019, algorithm 1).

    For a block x of B elements: :math:`C(x) = (\|x\|_1 / B) \, \mathrm{sign}(x)` with sign(0) = 1. Biased:
    :math:`\|C(x) - x\|^2 = (1 - \delta) \|x\|^2` with :math:`\delta = \|x\|_1^2 / (B \|x\|_2^2)`, between 1/B (one
    element is everything) and 1 (all magnitudes are equal); 0.64 for a Gaussian. Without error feedback it need not
    converge (the same paper, section 3); with it, both ends keep what they have not sent, as 1-bit SGD (Seide et al.
    2014) and DoubleSqueeze (Tang et al. 2019) do.

    A block that is zero is sent as zero, so that a parameter without gradients collects no error, and neither does the
    padding of a parameter's last block. A zero among other elements cannot be sent: it goes out as plus and minus the
    block's mean in turn, which error feedback keeps bounded. Where rows of an embedding are rarely used and shorter
    than a block, make blocks as short as rows, or send it otherwise (`Route`).

    Payload: ``rows * (block / 8 + 4)`` bytes with ``rows = ceil(numel / block)``, 0.035 of float32 with the default
    block, pattern ``"exchange"`` then ``"gather"``: each rank sends 2 (N-1)/N of it, whatever N is; with several ranks
    per node use two levels. Memory with error feedback: one float32 per element, and 1/N more for the blocks a rank
    owns. Under AdamW start uncompressed (`Schedule`): its second moments need a while to know the gradient's size.

    Args:
        block: Elements per magnitude, a multiple of 8. Larger: fewer bytes, coarser. Where magnitudes differ inside
            a block, small elements are drowned in the error of large ones.

    Raises:
        ValueError: for a block out of range.
    """

    block: int = 256
    biased: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False
    planes: ClassVar[int] = 8  # type: ignore[misc]
    word: ClassVar[torch.dtype] = torch.uint8

    def __post_init__(self) -> None:
        check_block(type(self).__name__, self.block)

    @override
    def encode_planes(self, values: Planes, keys: Tensor | None) -> tuple[Code, list[Tensor]]:
        norm = total([v.abs() for v in values]).to(torch.float32)
        size = (norm * (1 / self.block)).to(values[0].dtype)
        negative = [(v < 0).to(v.dtype) for v in values]
        return (join(negative, 1), norm.squeeze(1)), [_signed(n, size) for n in negative]

    @override
    def decode_planes(self, code: Code, like: Planes) -> list[Tensor]:
        size = (code[1].unsqueeze(1) * (1 / self.block)).to(like[0].dtype)
        return [_signed(n, size) for n in split(code[0], 1, like)]


def _signed(negative: Tensor, size: Tensor) -> Tensor:
    """`size` where `negative` is 0, -`size` where it is 1; overwrites it."""
    return negative.mul_(-2).add_(1).mul_(size)


@dataclass(frozen=True)
class SignVote(Sign):
    r"""One bit up, the majority's bit down (Bernstein et al. 2019, "signSGD with majority vote", algorithm 1).

    With s_r the mean magnitude of a block on rank r, in units of the mean over the ranks:

    .. math::
        C = \bigl(\textstyle\sum_r s_r\bigr) \, \mathrm{sign}\bigl(\textstyle\sum_r \mathrm{sign}(x_r)\bigr)

    A tie goes to the side whose magnitudes are larger. The paper sends no magnitude; here the result has that of the
    mean gradient, so that zeros stay zeros and learning rates keep their meaning. A rank has one vote, however large
    its gradient: a minority of broken or hostile ranks cannot turn a sign, but can change the magnitude.

    Biased, and no error feedback mends it, since a vote is no sum: `ErrorFeedback` refuses it. It converges where the
    noise of gradients is symmetric (the paper, assumption 4), and stalls elsewhere as `Sign` without error feedback
    does. Needs ``aggregator="mean"``. Payload, pattern and growth as `Sign`; no memory.

    Args:
        block: Elements per magnitude, a multiple of 8.

    Raises:
        ValueError: for a block out of range.
    """

    aggregates: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    @override
    def combine_code(
        self, code: Sequence[Tensor], plan: BlockPlan, state: State
    ) -> Generator[Payload, Payload, Tensor]:
        yield from ()  # decided here: no aggregator is asked
        rows = self.decode(code, plan.dtype, kernels_in(state))
        loudest = rows.sum(0)
        votes = rows.sign_().sum(0)  # a rank whose block is zero abstains
        size = (code[1].to(rows.dtype) * (1 / self.block)).sum(0)
        return torch.where(votes == 0, loudest, votes).sign_().mul_(size)
