"""What each lane was given to compute, and how long requests waited for pages. Monotonic counts; nothing is decided by them."""
import time
from collections import Counter
from collections.abc import Callable

from sglane.mem_cache.page_layout import LaneCounts, PageLayout, Shortfall
from sglane.utils.histogram import TimeHistogram

#: Upper bounds of the buckets; one more takes the rest. Seconds.
WAIT_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Instead of a lane: pages of any lane would do.
ANY_LANE = "any"


class PageWaits:
    """Requests that asked for pages and did not get them in the same step. The clock goes to the histogram and nowhere else."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic):
        self._clock_s = clock_s
        self._since_s: dict[str, float] = {}  # by rid
        self._counts: Counter[tuple[str, str]] = Counter()  # (lane, reason) -> waits
        self._times = TimeHistogram(WAIT_BOUNDS_S)

    def refused(self, rid: str, shortfall: Shortfall | None) -> None:
        """No pages in this step. A wait counts once, with what was missing when it began; None: the reserve for running requests is."""
        if rid in self._since_s:
            return
        self._since_s[rid] = self._clock_s()
        reason = "pending" if shortfall is not None and shortfall.pending else "short"
        lanes = [] if shortfall is None else [str(lane) for lane in shortfall.lanes.nonzero()[0].tolist()]
        for lane in lanes or [ANY_LANE]:
            self._counts[lane, reason] += 1

    def ended(self, rid: str) -> None:
        """It has its pages, or no longer wants them."""
        if self._since_s and rid in self._since_s:
            self._times.add(self._clock_s() - self._since_s.pop(rid))

    @property
    def num_waiting(self) -> int:
        return len(self._since_s)

    def report(self) -> dict[str, object]:
        """counts: [lane or "any", "pending" (they wait for steps under way) or "short", number]. times: see TimeHistogram."""
        return {"counts": [[*key, count] for key, count in sorted(self._counts.items())], "times": self._times.report()}


class LaneWork:
    """Tokens of issued steps by the lane that computes them, and `waits`."""

    def __init__(self, layout: PageLayout):
        self._num_tokens = layout.no_counts()
        self._num_busiest = 0
        self._prefix_wait_s = [0.0] * layout.cp_size
        self.waits = PageWaits()

    def add(self, lane_tokens: LaneCounts) -> None:
        """lane_tokens: int64 [cp_size] tokens of one step."""
        self._num_tokens += lane_tokens
        self._num_busiest += int(lane_tokens.max())

    def waited(self, lane: int, prefix_wait_s: float) -> None:
        """prefix_wait_s: of this lane's rank since the start, as its last result says."""
        self._prefix_wait_s[lane] = prefix_wait_s

    def report(self) -> dict[str, object]:
        """computed_tokens: by lane. prefix_wait_seconds: by lane, time that attention waited for prefix pages. busiest_lane_tokens: those of the
        busiest lane of each step, over all steps: it is what the others wait for. page_waits: see PageWaits."""
        return {"computed_tokens": self._num_tokens.tolist(), "prefix_wait_seconds": self._prefix_wait_s,
                "busiest_lane_tokens": self._num_busiest, "page_waits": self.waits.report()}
