"""A loader that goes on, without data, until the loaders of all ranks have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lightning_sync.comm.attendance import Attendance
from lightning_sync.sampler import SharedSampler

Miss = Callable[[int], bool]


class JoinedLoader:
    """Stands in for a rank's training loader, and ends when those of all ranks have.

    Once its own data is used up it yields the last batch again, as a stand-in for hooks that look at batches: nobody
    must learn from it, see `spare`. A rank that never had one yields empty lists.

    Args:
        loader: This rank's.
        attendance: How it is known who has data.
        miss: What asks `attendance` about an index for which this rank has nothing.
        all_or_none: End as soon as any rank's data ends. Then every item waits for all ranks.

    Attributes:
        taken: Batches that the training loop has begun in this pass. Set by the strategy; loaders run ahead.
        real: Batches that this rank had in this pass, once it has run out of them.
    """

    loader: Any
    attendance: Attendance
    taken: int
    real: int | None
    _miss: Miss
    _all_or_none: bool
    _last: Any
    _resume: tuple[int, int | None]
    _began: int
    _ended: bool

    def __init__(self, loader: Any, attendance: Attendance, miss: Miss, *, all_or_none: bool = False) -> None:
        own = vars(self)
        own["loader"] = loader
        own["attendance"] = attendance
        own["taken"] = 0
        own["real"] = None
        own["_miss"] = miss
        own["_all_or_none"] = all_or_none
        own["_last"] = []
        own["_resume"] = (0, None)
        own["_began"] = 0
        own["_ended"] = False

    @property
    def spare(self) -> bool:
        """Whether the batch that the loop has begun last is no data."""
        return self.real is not None and self.taken > self.real

    @property
    def index(self) -> int:
        """Index of the batch that the loop has begun last."""
        return self.taken - 1

    def __len__(self) -> int:
        if self.attendance.length is None:
            raise TypeError("the ranks' loaders have no length, or not all of them do")
        return int(self.attendance.length)

    def __iter__(self) -> Iterator[Any]:
        start, real = self._resume
        self.attendance.begin()
        self.taken, self.real, self._resume = start, real, (0, None)
        self._began, self._ended = start, False
        return self._pass(start)

    @property
    def ended(self) -> bool:
        """Whether the loop has begun the last batch of this pass."""
        return self._ended or (self.attendance.length is not None and self.taken >= self.attendance.length)

    def _pass(self, index: int) -> Iterator[Any]:
        yield from self._items(index)
        self._ended = True

    def _items(self, index: int) -> Iterator[Any]:
        source = iter(self.loader) if self.real is None else iter(())
        claimed = sized_len(self.loader) if self.attendance.length is not None else None
        while True:
            if self.real is None:
                try:
                    batch = next(source)
                except StopIteration:
                    if claimed is not None and index < claimed:
                        raise RuntimeError(
                            f"this rank's training loader said that it has {claimed} batches, but ended after {index}. "
                            "Other ranks count on them. Let its length be right, or let it have none."
                        ) from None
                    self.real = index
            if self.real is None:
                self.attendance.take(index)
                if self._all_or_none and not all(self.attendance.present(index) or ()):
                    return
                self._last = batch
                yield batch
                if claimed is not None and index + 1 == claimed:
                    self.real = claimed  # the others do not count on more
            else:
                if not self._miss(index) or self._all_or_none:
                    return
                yield self._last
            index += 1

    def __getattr__(self, name: str) -> Any:
        if "loader" not in vars(self):  # being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:  # Lightning sets what it would set on the loader
            setattr(self.loader, name, value)


class StatefulJoinedLoader(JoinedLoader):
    """A `JoinedLoader` of a loader that can say where it is."""

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, and where the loop is."""
        return {"loader": self.source_state(), "taken": self.taken, "real": self.real, "ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where `state_dict` was called; at the end of a pass that is a new one."""
        if not state["ended"]:
            self._resume = (int(state["taken"]), state["real"])
        self.load_source(state)

    def source_state(self) -> dict[str, Any]:
        """Where this rank's own data is."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_source(self, state: dict[str, Any]) -> None:
        """Let it go on from there; if it was used up already, the next time that it is asked is a new pass."""
        if state["ended"] or state["real"] is None:
            self.loader.load_state_dict(state["loader"])


class SharedJoinedLoader(StatefulJoinedLoader):
    """A `JoinedLoader` of a loader whose indices come from a `SharedSampler`."""

    def source_state(self) -> dict[str, Any]:  # noqa: D102 - inherited
        taken = self.taken if self.real is None else min(self.taken, self.real)
        state: dict[str, Any] = self.loader.sampler.state_dict((taken - self._began) * self.loader.batch_size)
        return state

    def load_source(self, state: dict[str, Any]) -> None:  # noqa: D102 - inherited
        if state["ended"]:
            self.loader.sampler.set_epoch(state["loader"]["epoch"] + 1)
        else:
            self._resume = (int(state["taken"]), None)  # the other ranks wait for it to say how far it had drawn
            self.loader.sampler.load_state_dict(state["loader"])


def joined(loader: Any, attendance: Attendance, miss: Miss, *, all_or_none: bool = False) -> JoinedLoader:
    """The `JoinedLoader` that suits a loader."""
    kind = JoinedLoader
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        kind = StatefulJoinedLoader
    elif isinstance(getattr(loader, "sampler", None), SharedSampler) and getattr(loader, "batch_size", None):
        kind = SharedJoinedLoader
    return kind(loader, attendance, miss, all_or_none=all_or_none)
