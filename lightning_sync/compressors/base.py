"""The compressor contract: what travels on the wire, said as a generator of payloads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.state import ParamSpec, State

Pattern = Literal["sum", "exchange", "gather"]


@dataclass(frozen=True)
class Payload:
    """What one rank hands to one collective, and what it gets back.

    Attributes:
        pattern: How the payloads of N ranks become one:

            * ``"sum"``: all-reduce, in place. Back come the same tensors, which now hold the element-wise sum over the
              ranks. Floating-point tensors only.
            * ``"exchange"``: all-to-all. `tensors` have `sum(splits)` rows; the first `splits[0]` go to rank 0, and so
              on. Back comes, for the rows this rank owns, what every rank sent: `[N, splits[rank], ...]`.
            * ``"gather"``: all-gather. `tensors` have `splits[rank]` rows; back come the rows of all ranks, in rank
              order: `[sum(splits), ...]`.
        tensors: What travels, of any dtype.
        splits: Rows per rank, for ``"exchange"`` and ``"gather"``; the same tuple on all ranks.
    """

    pattern: Pattern
    tensors: tuple[Tensor, ...]
    splits: tuple[int, ...] = ()


Reduction = Generator[Payload, Payload, Sequence[Tensor]]


class Compressor(ABC):
    """Base class of everything that decides what is on the wire.

    A compressor is a frozen dataclass of hyper-parameters; whatever changes lives in the `State` that `init` makes.
    One compressor object can serve any number of models and groups.

    Class attributes:
        biased: True when what is sent differs systematically from what was meant; `ErrorFeedback` is then wrapped
            around it by default, and the log says so.
        alignment: A parameter may be cut at multiples of this many elements and its parts reduced by different
            ranks; `None` when it needs whole parameters. Used by the two-level reduction.
        aggregates: Whether it hands all N contributions to every element to the aggregator (``"exchange"``,
            ``"gather"``; `State.combine`), so that aggregators other than the mean can be used with it. False for what
            leaves out elements: those that a rank did not send would count as zeros.
        by_parameter: Whether it also tells which elements belong to which parameter (`State.aggregate`), for
            aggregators that need sums over whole parameters.
        remembers: Whether it can keep what it does not send, by `remember` and `reduce_late`. `ErrorFeedback` and the
            other wrappers with a memory need that.

    All of them may be properties.
    """

    biased: ClassVar[bool] = False
    alignment: int | None = 1
    aggregates: ClassVar[bool] = False
    by_parameter: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    @abstractmethod
    def init(self, params: Sequence[ParamSpec]) -> State:
        """Make the state for these parameters, given in registration order.

        A compressor that keeps back what it has not sent yet says so in `State.undelivered`: then nothing of it is lost
        when a run goes on with other ranks.
        """

    @abstractmethod
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        """Reduce one bucket: yield payloads, receive the combined ones, return the combined tensors.

        Args:
            keys: Keys of the parameters in this bucket (`ParamSpec.key`), in the bucket's order.
            tensors: This rank's gradients (or deltas), one per key, with the parameters' shapes. They may be
                overwritten, and may be returned.
            state: The state `init` made; multiply the input by `state.share` first.

        Returns:
            The combined tensors, one per key, the same bits on all ranks.
        """

    @abstractmethod
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        """Predict what this rank sends in one reduction of all `params` (step `None`: after any warm-up)."""

    def remember(self, state: State) -> None:
        """Declare in a fresh `state` what `reduce_late` keeps: arenas, lazy ones, and which of it is undelivered.

        The arena ``"residual"`` holds, per parameter, what this rank has not sent, in units of the mean. Its first
        `numel` elements are the parameter's.
        """
        raise TypeError(f"{self!r} cannot keep what it does not send: it has no remember() and reduce_late().")

    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        """As `reduce`, of ``decay * residual + share * tensors``; the residual becomes what was not sent of it.

        Must have written the residual when it yields its first payload. With `decay` 0 old residuals do not matter,
        whatever they hold. Elements with inf or NaN show in the result once, when they are sent, and are not kept.
        """
        raise TypeError(f"{self!r} cannot keep what it does not send: it has no remember() and reduce_late().")

    def accepts(self, param: ParamSpec) -> bool:
        """Whether this parameter is worth compressing; the others travel exactly."""
        return True

    def exchanged(self) -> Compressor | None:
        """What takes its place under an aggregator that has to see every rank's contribution.

        Returns:
            Itself, where it hands them over; another compressor that sends the same number format; or `None`, where it
            only works as a sum on the wire.
        """
        return self if self.aggregates else None

    def rebuilt(self, change: Callable[[Compressor], Compressor]) -> Compressor:
        """The same, with `change` applied to the compressors it chooses from; others stay as they are."""
        return self
