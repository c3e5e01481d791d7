"""How long requests waited for admission: one histogram. Reads no clock; times are handed in."""
from sglane.utils.histogram import TimeHistogram

#: Upper bounds of the buckets; one more takes the rest. Seconds.
BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class QueueTimes:
    """Only the first admission of a request counts: a retracted one had its turn."""

    def __init__(self) -> None:
        self._arrived_s: dict[str, float] = {}  # by rid, of requests that were never admitted
        self._new: dict[str, float] = {}
        self._histogram = TimeHistogram(BOUNDS_S)

    def arrived(self, rid: str, now_s: float) -> None:
        self._arrived_s[rid] = now_s

    def admitted(self, rid: str, now_s: float) -> None:
        arrived_s = self._arrived_s.pop(rid, None)
        if arrived_s is not None:
            self._new[rid] = waited_s = now_s - arrived_s
            self._histogram.add(waited_s)

    def take_new(self) -> dict[str, float]:
        """rid -> seconds, of the first admissions since the last call."""
        new, self._new = self._new, {}
        return new

    def ended(self, rid: str) -> None:
        """It may have been refused or aborted while it waited."""
        self._arrived_s.pop(rid, None)

    @property
    def num_waiting(self) -> int:
        return len(self._arrived_s)

    def report(self) -> dict[str, object]:
        """See TimeHistogram."""
        return self._histogram.report()
