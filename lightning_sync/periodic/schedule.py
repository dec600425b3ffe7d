"""Which fragments start and end their exchange after which step."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_sync.periodic.period import Period, Progress


class Schedule:
    """The clock of one replica: a function of the number of steps, so that it is the same on all ranks.

    Fragment p of P ends its exchanges after steps (p+1)H/P, (p+1)H/P + H, ... (rounded down), so that one fragment
    travels every H/P steps; it starts them `overlap` steps before. One fragment without overlap: after every H-th step.

    Args:
        period: H.
        fragments: P. More than one needs a fixed period.
        overlap: tau, steps between start and end; less than the distance of two exchanges.

    Raises:
        ValueError: for a combination that does not work, naming the limit.
    """

    def __init__(self, period: Period, fragments: int = 1, overlap: int = 0) -> None:
        self.period = period
        self.fragments = fragments
        self.overlap = overlap
        self.next_end = 0  # of a period that is not fixed
        if not period.fixed:
            if fragments > 1:
                raise ValueError(f"fragments={fragments} needs a fixed sync_every, not {period!r}.")
            return
        self._length = period.length(Progress(0, 0.0, 0.0))
        if fragments > self._length:
            raise ValueError(
                f"fragments={fragments} with sync_every={self._length}: at most one fragment can travel after a step. "
                f"Use at most {self._length} fragments."
            )
        gap = self._length // fragments
        if overlap >= gap:
            raise ValueError(
                f"overlap_steps={overlap} must be smaller than the {gap} steps between two exchanges "
                f"(sync_every={self._length} over {fragments} fragments)."
            )

    def begin(self, progress: Progress) -> None:
        """Set the first period; call before step 1."""
        if not self.period.fixed:
            self.next_end = max(self.period.length(progress), self.overlap + 1)

    def propose(self, progress: Progress) -> int:
        """The period that this rank would have next."""
        return max(self.period.length(progress), self.overlap + 1)

    def agreed(self, step: int, length: int) -> None:
        """Take over the period that all ranks have agreed on, after the exchange that ended after `step`."""
        self.next_end = step + length

    def ends(self, step: int) -> list[int]:
        """Fragments whose exchange ends after step `step` (the first is 1)."""
        if not self.period.fixed:
            return [0] if step == self.next_end else []
        offsets = [(p + 1) * self._length // self.fragments for p in range(self.fragments)]
        return [p for p, o in enumerate(offsets) if step >= o and (step - o) % self._length == 0]

    def starts(self, step: int) -> list[int]:
        """Fragments whose exchange starts after step `step`."""
        return self.ends(step + self.overlap) if step + self.overlap > 0 else []

    @property
    def steps_per_round(self) -> int | None:
        """Steps in which every fragment travels once; `None` where that varies."""
        return self._length if self.period.fixed else None

    def state_dict(self) -> dict[str, int]:
        """What cannot be computed from the number of steps."""
        return {"next_end": self.next_end}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what `state_dict` returned."""
        self.next_end = int(state["next_end"])
