"""A loader that goes on, without data, until the loaders of all ranks have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lightning_sync.comm.attendance import Attendance

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
        return self._pass(start)

    def _pass(self, index: int) -> Iterator[Any]:
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
        return {"loader": self.loader.state_dict(), "taken": self.taken, "real": self.real}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin where `state_dict` was called."""
        self._resume = (int(state["taken"]), state["real"])
        self.loader.load_state_dict(state["loader"])


def joined(loader: Any, attendance: Attendance, miss: Miss, *, all_or_none: bool = False) -> JoinedLoader:
    """The `JoinedLoader` that suits a loader."""
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    kind = StatefulJoinedLoader if stateful else JoinedLoader
    return kind(loader, attendance, miss, all_or_none=all_or_none)
