"""A notice board on a torch store: the few calls that a watcher makes, none of which waits for a missing key."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store


class Board:
    """Keys of one run on a shared store.

    Every notice that others must react to raises one counter, so that a reader with nothing to do makes one call.

    Args:
        store: Any torch store. It is cloned: calls on one TCPStore client wait for each other, so each thread needs its
            own. (A HashStore's clone is the store itself, which locks inside.) A board belongs to one thread.
        prefix: What all keys of the run start with.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        clone = getattr(store, "clone", None)  # torch's type stubs leave it out
        if clone is None:
            raise ValueError(f"store={store!r} has no clone(); give a TCPStore, FileStore, HashStore or PrefixStore")
        self._store: Any = PrefixStore(prefix, clone())

    def news(self) -> int:
        """Return how many notices were posted so far."""
        return int(self._store.add("news", 0))

    def post(self, key: str, text: str) -> None:
        """Write a notice that only this rank writes."""
        self._store.set(key, text)
        self._store.add("news", 1)

    def claim(self, key: str, text: str) -> str:
        """Write a notice unless another rank has already; return the one that stands."""
        standing: bytes = self._store.compare_set(key, "", text)
        self._store.add("news", 1)
        return standing.decode("utf-8", "replace")

    def put(self, key: str, text: str) -> None:
        """Write a value that nobody needs to react to."""
        self._store.set(key, text)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value; 0 reads it."""
        return int(self._store.add(key, amount))

    def has(self, key: str) -> bool:
        """Return whether a key was written."""
        return bool(self._store.check([key]))

    def read(self, key: str) -> str:
        """Return the value of a key that exists."""
        value: bytes = self._store.get(key)
        return value.decode("utf-8", "replace")

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return the values of keys that all exist, in one round trip where the store can do that."""
        if self._store.has_extended_api():
            return [value.decode("utf-8", "replace") for value in self._store.multi_get(list(keys))]
        return [self.read(key) for key in keys]
