"""A histogram of durations that can travel in a message."""
from bisect import bisect_left
from collections.abc import Sequence


class TimeHistogram:
    """bounds_s: upper bounds of the buckets, ascending, seconds; one more bucket takes the rest."""

    def __init__(self, bounds_s: Sequence[float]):
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self._sum_s += duration_s

    def report(self) -> dict[str, object]:
        """`counts[i]`: times up to `bounds_s[i]` that are above the bound before; the last count has no bound."""
        return {"bounds_s": list(self._bounds_s), "counts": list(self._counts), "sum_s": self._sum_s}
