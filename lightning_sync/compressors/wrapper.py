"""What compressors that stand around another one have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_sync.comm.topology import Bytes, Topology
from lightning_sync.compressors.base import Compressor, Reduction
from lightning_sync.state import ParamSpec, State


@dataclass(frozen=True)
class Wrapper(Compressor):
    """Does what the inner compressor does; subclasses change some of it.

    Args:
        inner: The compressor.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise TypeError(f"{type(self).__name__}(inner={self.inner!r}): inner must be a Compressor.")

    @property
    @override
    def biased(self) -> bool:  # type: ignore[override]
        return self.inner.biased

    @property
    @override
    def alignment(self) -> int | None:  # type: ignore[override]
        return self.inner.alignment

    @property
    @override
    def aggregates(self) -> bool:  # type: ignore[override]
        return self.inner.aggregates

    @property
    @override
    def by_parameter(self) -> bool:  # type: ignore[override]
        return self.inner.by_parameter

    @property
    @override
    def remembers(self) -> bool:  # type: ignore[override]
        return self.inner.remembers

    @override
    def accepts(self, param: ParamSpec) -> bool:
        return self.inner.accepts(param)

    @override
    def exchanged(self) -> Compressor | None:
        inner = self.inner.exchanged()
        return None if inner is None else replace(self, inner=inner)

    @override
    def rebuilt(self, change: Callable[[Compressor], Compressor]) -> Compressor:
        return replace(self, inner=self.inner.rebuilt(change))

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        return self.inner.init(params)

    @override
    def remember(self, state: State) -> None:
        self.inner.remember(state)

    @override
    def reduce(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State) -> Reduction:
        return (yield from self.inner.reduce(keys, tensors, state))

    @override
    def reduce_late(self, keys: Sequence[str], tensors: Sequence[Tensor], state: State, decay: float) -> Reduction:
        return (yield from self.inner.reduce_late(keys, tensors, state, decay))

    @override
    def wire_bytes(self, params: Sequence[ParamSpec], topology: Topology, step: int | None = None) -> Bytes:
        return self.inner.wire_bytes(params, topology, step)


@dataclass(frozen=True)
class Remembering(Wrapper):
    """A wrapper that makes the inner compressor keep what it does not send: nothing is left to wrap feedback around."""

    biased: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inner.remembers:
            raise TypeError(
                f"{type(self).__name__}(inner={self.inner!r}): inner cannot keep what it does not send. Use a codec of "
                "blocks, such as BlockInt8 or ChunkTopK, or a RandomBlock; casts need no error feedback, and PowerSGD "
                "keeps its own."
            )

    @override
    def init(self, params: Sequence[ParamSpec]) -> State:
        state = self.inner.init(params)
        self.inner.remember(state)
        return state
