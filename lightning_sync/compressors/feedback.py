"""Error feedback: remember what was not sent, and send it later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_sync.compressors.base import Reduction
from lightning_sync.compressors.wrapper import Remembering
from lightning_sync.state import State


@dataclass(frozen=True)
class ErrorFeedback(Remembering):
    r"""Wrap a compressor so that nothing is lost, only late.

    Each rank keeps a residual e_r (float32 or wider, in units of the mean) per parameter. With C what the compressor
    sends and w_r the rank's share (1/N):

    .. math::
        x_r = \beta e_r + w_r g_r, \qquad c_r = C(x_r), \qquad e_r \leftarrow x_r - c_r, \qquad m = \textstyle\sum_r c_r

    m is what every rank gets. Where owners combine the contributions and encode again (codecs of blocks), each owner
    keeps a residual f of the blocks it owns as well:

    .. math::
        y = \beta f + \textstyle\sum_r c_r, \qquad m = C(y), \qquad f \leftarrow y - m

    With decay 1 the sums telescope: over any number of steps, all that was delivered plus what the residuals hold is
    the true sum of the means. (Seide et al. 2014; Karimireddy et al. 2019, algorithm 2; both ends as in Tang et al.
    2019, DoubleSqueeze.) A block with inf or NaN makes this step's result non-finite, as it would without compression,
    and its residual starts again from zero: later steps are sound.

    Under another aggregator than the mean, A in place of the sum: every rank's stream of contributions still telescopes
    (what it sent plus e_r is what it meant to send), and so does the result (what was delivered plus f is the sum of
    the A of what was sent). But A of late contributions is not A of the true ones: what a rank could not send in one
    step is judged with those of a later one. A rank of share 0, whose row A leaves out, keeps its residual as it is.

    Args:
        inner: The compressor: a codec of blocks, `RandomBlock`, or any that `remembers`.
        decay: beta in (0, 1]. Below 1, old residuals fade: less staleness, but the sums no longer telescope.

    Raises:
        TypeError: if `inner` cannot keep what it does not send.
        ValueError: for a decay out of range.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ValueError(f"ErrorFeedback(decay={self.decay!r}): decay must lie in (0, 1].")

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        return (yield from self.inner.reduce_late(keys, tensors, state, self.decay))
