"""Mean, 95th percentile, largest and histogram of small whole numbers, in memory of fixed size."""

from __future__ import annotations

from collections import Counter

_LAST_BIN = 1023


class Spread:
    """Counts how often each number came; 1023 stands for that and more, the largest is kept exactly."""

    def __init__(self) -> None:
        self.histogram: Counter[int] = Counter()
        self._sum = self._largest = self._count = 0

    def add(self, value: int) -> None:
        """Count a number of at least 0."""
        self.histogram[min(value, _LAST_BIN)] += 1
        self._sum += value
        self._count += 1
        self._largest = max(self._largest, value)

    def summary(self) -> dict[str, float]:
        """Mean, p95 (the smallest number that at least 95 % do not exceed) and max; zeros before the first."""
        seen, p95 = 0, 0
        for value in sorted(self.histogram):
            seen += self.histogram[value]
            if seen * 20 >= self._count * 19:
                p95 = value
                break
        return {"mean": self._sum / max(1, self._count), "p95": float(p95), "max": float(self._largest)}
