"""Free pages of each lane, and pages that are neither in use nor reusable yet.

The life of a page here:

    FREE --alloc--> TAKEN --free, no step outstanding--> FREE
                    TAKEN --free, steps outstanding----> TICKET --retire(stamp)--> FREE
                    TAKEN --park-----------------------> PARKED --unpark--> as free

A parked page has been given back, but an asynchronous copy of it has not ended. TAKEN covers what the ledger calls cached (in the tree) and
held (of a request). The sink row of each lane is in no class.
"""
from collections import deque

import numpy as np
import numpy.typing as npt

from sglane.mem_cache.page_layout import NO_PAGES, LaneCounts, Lanes, LedgerError, PageLayout, Pages, Shortfall

FREE, TAKEN, TICKET, SINK, PARKED = 0, 1, 2, 3, 4
STATE_NAMES = ("free", "taken", "ticket", "sink", "parked")


class LaneAllocator:
    """The one writer of page classes. num_rows: rows of each lane, the sink row included."""

    def __init__(self, layout: PageLayout, num_rows: int, record_reusable: bool = False) -> None:
        if num_rows < 2:
            raise ValueError(f"num_rows {num_rows}: a lane needs its sink row and at least one row more")
        self.layout = layout
        self.num_rows = num_rows
        cp_size = layout.cp_size
        rows = np.arange(num_rows - 1, 0, -1, dtype=np.int32)
        self._stacks: list[Pages] = [rows * np.int32(cp_size) + np.int32(lane) for lane in range(cp_size)]  # the top is taken first
        self._num_free: LaneCounts = np.full(cp_size, num_rows - 1, np.int64)
        self._num_tickets: LaneCounts = layout.no_counts()
        self._num_parked: LaneCounts = layout.no_counts()
        self._tickets: deque[tuple[int, Pages]] = deque()  # (stamp, pages), stamps never fall
        self._state: npt.NDArray[np.uint8] = np.full(num_rows * cp_size, FREE, np.uint8)
        self._state[:cp_size] = SINK
        self._retired_step = 0
        self._record_reusable = record_reusable
        self._reusable: list[Pages] = []

    def free_counts(self) -> LaneCounts:
        return self._num_free.copy()

    def ticket_counts(self) -> LaneCounts:
        """Pages that will be free when steps have retired or copies have ended."""
        return self._num_tickets + self._num_parked

    def alloc(self, owners: Lanes) -> Pages | Shortfall:
        """One free page of each named lane, int32 [n] in the order of `owners`; a Shortfall (nothing changed) if a lane lacks pages."""
        if len(owners) == 1:
            return self._alloc_one(int(owners[0]))
        wanted = np.bincount(owners, minlength=self.layout.cp_size)
        if (wanted > self._num_free).any():
            pending = bool((wanted <= self._num_free + self.ticket_counts()).all())
            return Shortfall(np.maximum(wanted - self._num_free, 0), 0, pending)
        pages = np.empty(len(owners), np.int32)
        for lane in np.flatnonzero(wanted).tolist():
            top = int(self._num_free[lane])
            pages[owners == lane] = self._stacks[lane][top - int(wanted[lane]) : top][::-1]
        self._num_free -= wanted
        self._state[pages] = TAKEN
        return pages

    def free(self, pages: Pages, step_stamp: int) -> None:
        """Give pages back. They become reusable when the step `step_stamp` has retired, at once if it has. Raises LedgerError for a page that
        is not taken (double free, foreign page, sink) or named twice; nothing is changed then."""
        if not len(pages):
            return
        self._check(pages, TAKEN)
        if step_stamp <= self._retired_step:
            self._make_reusable(pages)
            return
        if self._tickets and self._tickets[-1][0] > step_stamp:
            raise LedgerError(f"pages freed with stamp {step_stamp} after pages with stamp {self._tickets[-1][0]}")
        self._state[pages] = TICKET
        self._num_tickets += self.layout.lane_counts(pages)
        self._tickets.append((step_stamp, pages.copy()))

    def park(self, pages: Pages) -> None:
        """Give pages back of which a copy is under way. Raises LedgerError as free() does."""
        if len(pages):
            self._check(pages, TAKEN)
            self._state[pages] = PARKED
            self._num_parked += self.layout.lane_counts(pages)

    def unpark(self, pages: Pages, step_stamp: int) -> None:
        """The copies have ended: the pages are freed. Raises LedgerError for pages that are not parked."""
        if len(pages):
            self._check(pages, PARKED)
            self._state[pages] = TAKEN
            self._num_parked -= self.layout.lane_counts(pages)
            self.free(pages, step_stamp)

    def is_parked(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """bool [n]"""
        return np.asarray(self._state[pages] == PARKED)

    def retire(self, step: int) -> None:
        """All ranks have returned the result of `step`: pages stamped up to it become reusable."""
        if step < self._retired_step:
            raise LedgerError(f"step {step} retires after step {self._retired_step}")
        self._retired_step = step
        while self._tickets and self._tickets[0][0] <= step:
            _, pages = self._tickets.popleft()
            self._num_tickets -= self.layout.lane_counts(pages)
            self._make_reusable(pages)

    def drain_reusable(self) -> Pages:
        """Pages that became reusable since the last call (only with record_reusable). A page may have been allocated again since."""
        pages = np.concatenate(self._reusable) if self._reusable else NO_PAGES
        self._reusable = []
        return pages

    def free_pages(self) -> Pages:
        """All free pages, lane by lane (for audits)."""
        return np.concatenate([stack[:count] for stack, count in zip(self._stacks, self._num_free.tolist(), strict=True)])

    def ticket_pages(self) -> Pages:
        """Pages that wait for a step or for the end of a copy (for audits)."""
        return np.concatenate([NO_PAGES, *(pages for _, pages in self._tickets), np.flatnonzero(self._state == PARKED).astype(np.int32)])

    def audit(self) -> None:
        """Raises LedgerError unless states, stacks, tickets and counts tell the same."""
        for state, listed, counts in ((FREE, self.free_pages(), self._num_free), (TICKET, self.ticket_pages(), self.ticket_counts())):
            marked = np.flatnonzero((self._state == state) | ((self._state == PARKED) & (state == TICKET))).astype(np.int32)
            odd = np.setxor1d(marked, listed)
            if len(odd) or len(listed) != len(marked):
                raise LedgerError(f"pages listed and marked as {STATE_NAMES[state]} differ: {self.layout.describe(odd)}")
            if (self.layout.lane_counts(marked) != counts).any():
                raise LedgerError(f"{STATE_NAMES[state]} counts {counts.tolist()}, but the lanes have {self.layout.lane_counts(marked).tolist()}")

    def _alloc_one(self, lane: int) -> Pages | Shortfall:
        top = int(self._num_free[lane])
        if top == 0:
            missing = self.layout.no_counts()
            missing[lane] = 1
            return Shortfall(missing, 0, bool(self.ticket_counts()[lane]))
        pages = self._stacks[lane][top - 1 : top].copy()
        self._num_free[lane] = top - 1
        self._state[pages] = TAKEN
        return pages

    def _check(self, pages: Pages, state: int) -> None:
        if int(pages.min()) < 0 or int(pages.max()) >= len(self._state):
            raise LedgerError(f"pages {self.layout.describe(pages)} given back, but the pool has pages up to {len(self._state) - 1}")
        wrong = pages[self._state[pages] != state]
        if len(wrong):
            states = sorted({STATE_NAMES[found] for found in self._state[wrong].tolist()})
            raise LedgerError(f"pages {self.layout.describe(wrong)} given back, but their state is {', '.join(states)}, not {STATE_NAMES[state]}")
        if len(pages) > 1 and len(np.unique(pages)) != len(pages):
            ids, counts = np.unique(pages, return_counts=True)
            raise LedgerError(f"pages {self.layout.describe(ids[counts > 1])} given back twice in one call")

    def _make_reusable(self, pages: Pages) -> None:
        self._state[pages] = FREE
        lanes = self.layout.lanes(pages)
        for lane in np.unique(lanes).tolist():
            mine = pages[lanes == lane]
            count = int(self._num_free[lane])
            self._stacks[lane][count : count + len(mine)] = mine
            self._num_free[lane] = count + len(mine)
        if self._record_reusable:
            self._reusable.append(pages.copy())
