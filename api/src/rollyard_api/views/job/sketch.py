"""A histogram of any numbers in bounded room, which needs no range before it sees them.

Numbers are counted by the nearest multiple of a step, a power of two. The step doubles whenever more than
MAX_KEYS multiples are in use, and the counts are merged. Rewards are usually a few values from 0 to 1, which
the first step separates.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

MAX_KEYS: Final = 512
FIRST_STEP: Final = 2.0**-10
BINS: Final = 20


class Sketch:
    """The counts of numbers, with their exact minimum and maximum, their sum, and those equal to 0 and 1.

    Args:
        kept: What `document` of an earlier sketch returned, or None for an empty one.
    """

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        given = kept or {}
        self.step: float = given.get("step", FIRST_STEP)
        self.counts: Counter[int] = Counter({int(key): n for key, n in given.get("counts", ())})
        self.n: int = given.get("n", 0)
        self.sum: float = given.get("sum", 0.0)
        self.min: float | None = given.get("min")
        self.max: float | None = given.get("max")
        self.zeros: int = given.get("zeros", 0)
        self.ones: int = given.get("ones", 0)

    def add(self, value: float) -> None:
        """Count a finite number."""
        self.n += 1
        self.sum += value
        self.min = value if self.min is None else min(self.min, value)
        self.max = value if self.max is None else max(self.max, value)
        self.zeros += value == 0.0
        self.ones += value == 1.0
        self.counts[round(value / self.step)] += 1
        while len(self.counts) > MAX_KEYS:
            self._coarsen()

    def _coarsen(self) -> None:
        merged: Counter[int] = Counter()
        for key, n in self.counts.items():
            merged[round(key / 2)] += n
        self.step *= 2
        self.counts = merged

    def document(self) -> dict[str, Any]:
        """Return the sketch as a JSON object."""
        return {
            "step": self.step,
            "counts": sorted(self.counts.items()),
            "n": self.n,
            "sum": self.sum,
            "min": self.min,
            "max": self.max,
            "zeros": self.zeros,
            "ones": self.ones,
        }

    def histogram(self) -> dict[str, Any]:
        """Return {bins, min, max, n, mean, zeros, ones}: BINS counts of equal parts of min..max.

        A number is counted at most half a step away from where it is. If all numbers are equal, the first
        bin has all of them.
        """
        bins = [0] * BINS
        if self.n:
            assert self.min is not None
            assert self.max is not None
            width = (self.max - self.min) / BINS
            for key, n in self.counts.items():
                place = 0 if width <= 0 else int((key * self.step - self.min) / width)
                bins[min(max(place, 0), BINS - 1)] += n
        return {
            "bins": bins,
            "min": self.min,
            "max": self.max,
            "n": self.n,
            "mean": self.sum / self.n if self.n else None,
            "zeros": self.zeros,
            "ones": self.ones,
        }
