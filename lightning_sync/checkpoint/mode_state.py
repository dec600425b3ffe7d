"""What a mode keeps between steps, beside the compressors: an anchor, an outer optimiser, an exchange under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_sync.checkpoint.plain import is_tensors, require

Number = bool | int | float | str | None
Kinds = dict[str, dict[str, Tensor]]


@dataclass
class ModeState:
    """A mode's own state on one rank; all of it empty for a mode that keeps nothing.

    Attributes:
        numbers: Plain values, which may differ from rank to rank: a clock, the step of an exchange under way.
        replicated: Tensors that are the same on all ranks, bit for bit, ``{kind: {name: tensor}}``. Rank 0's are saved.
        local: Tensors of this rank alone, ``{kind: {name: tensor}}``. Another number of ranks cannot take them over.
    """

    numbers: dict[str, Number] = field(default_factory=dict)
    replicated: Kinds = field(default_factory=dict)
    local: Kinds = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.numbers or self.replicated or self.local)

    @property
    def kinds(self) -> list[str]:
        """Names of all that is in it."""
        return sorted({*self.numbers, *self.replicated, *self.local})

    def as_saved_by(self, rank: int) -> ModeState:
        """What this rank's file holds: of replicated tensors, the kinds alone unless it is rank 0."""
        return self if rank == 0 else ModeState(self.numbers, {kind: {} for kind in self.replicated}, self.local)

    def completed(self, first: ModeState) -> ModeState:
        """This rank's state with the replicated tensors of rank 0's file.

        Raises:
            StateFileError: if rank 0 saved other kinds.
        """
        require(
            first.replicated.keys() == self.replicated.keys(),
            f"rank 0 saved {sorted(first.replicated)} for all ranks, another rank expects {sorted(self.replicated)}",
        )
        return ModeState(self.numbers, first.replicated, self.local)

    @classmethod
    def parse(cls, raw: object, rank: int) -> ModeState:
        """Read the section of rank `rank`'s file.

        Raises:
            StateFileError: if it is anything but what `vars` of such a state holds.
        """
        where = f"rank {rank}: mode"
        require(isinstance(raw, dict) and set(raw) == set(cls.__dataclass_fields__), f"{where} has other fields")
        assert isinstance(raw, dict)
        numbers = raw["numbers"]
        require(
            isinstance(numbers, dict)
            and all(isinstance(k, str) for k in numbers)
            and all(v is None or type(v) in (bool, int, float, str) for v in numbers.values()),
            f"{where}: numbers are not plain values by name",
        )
        for part in ("replicated", "local"):
            require(_is_kinds(raw[part]), f"{where}: {part} is not a table of tensors by kind and name")
        require(rank == 0 or not any(raw["replicated"].values()), f"{where}: replicated tensors belong to rank 0")
        return cls(**raw)


def _is_kinds(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and is_tensors(t) for k, t in value.items())
