"""Names for the families that third parties can extend: compressors and aggregators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Short names of one family.

    Args:
        family: ``"compressor"`` or ``"aggregator"``; used in messages, and for the entry-point group
            ``lightning_sync.<family>s`` through which other packages add names.
        builtin: The names this package defines.
        accepts: The classes whose instances are passed through as they are.
    """

    def __init__(self, family: str, builtin: Mapping[str, Callable[..., T]], accepts: tuple[type, ...]) -> None:
        self.family = family
        self._factories = dict(builtin)
        self._accepts = accepts
        self._scanned = False

    def register(self, name: str, factory: Callable[..., T]) -> None:
        """Add a name; an existing one is never replaced."""
        if name in self._factories:
            raise ValueError(f"{self.family} {name!r} is already registered, as {self._factories[name]!r}.")
        self._factories[name] = factory

    def build(self, value: T | str) -> T:
        """An instance from a name (with its defaults) or from an instance."""
        if isinstance(value, self._accepts):
            return value  # type: ignore[return-value]
        if isinstance(value, str):
            if value not in self._factories:
                self._scan()
            if value in self._factories:
                return self._factories[value]()
        raise ValueError(
            f"{self.family}={value!r}: expected one of {', '.join(self)}, or an instance of "
            f"{' or '.join(c.__name__ for c in self._accepts)}."
        )

    def name(self, instance: object) -> str:
        """The short name of an instance's class, or the class's own name."""
        return next((n for n, f in self._factories.items() if f is type(instance)), type(instance).__name__)

    def __iter__(self) -> Iterator[str]:
        self._scan()
        return iter(self._factories)

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        for point in entry_points(group=f"lightning_sync.{self.family}s"):
            if point.name not in self._factories:
                self._factories[point.name] = point.load()
