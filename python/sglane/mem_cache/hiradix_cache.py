"""Where the host copies of device pages are: the one writer of residency, per page.

Host side of a device page (a copy that is READY is the page's twin; host pages of which no device page is left belong to a tree node):

    NONE --reserve--> RESERVED --commit--> READY
                      RESERVED --leave, promote--> given up: NONE or READY (of another host page); its host page is freed when the ticket ends
    NONE --promote (a host-only page gets this device page)--> READY
    READY --demote (the node keeps the host page), drop_copies, leave--> NONE

Copies are made between pages of the same lane. Where a page was computed again in another lane, its twin stays where it is: the lane of the twin is
that in which the page will be loaded again.

A reservation is untaken (no plan has its copy yet: given up at once, nothing to wait for), then it has an open ticket. A device page whose
ticket is open is not reusable, whatever its copy has become.

Device side:  present --begin_load--> LOADING --end_load--> present. A LOADING page has a twin: it is where its rows come from.
"""
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglane.mem_cache.lane_allocator import LaneAllocator
from sglane.mem_cache.page_layout import LaneCounts, LedgerError, PageLayout, Pages

NONE, RESERVED, READY = 0, 1, 2
STATE_NAMES = ("none", "reserved", "ready")
NO_TICKET, UNTAKEN_WRITING, UNTAKEN_WRITTEN = 0, -1, -2  # else the number of the open backup ticket
Mask = npt.NDArray[np.bool_]


class Left(NamedTuple):
    """Device pages that went, by what became of their copies."""

    num_ready: int  # their host pages are free
    num_reserved: int  # given up while the copy was under way


class Residency:
    """num_rows, num_host_rows: rows of each lane, the sink row included. A move that the table does not have raises LedgerError and changes
    nothing."""

    def __init__(self, layout: PageLayout, num_rows: int, num_host_rows: int, record_reusable: bool) -> None:
        self.layout = layout
        self.num_pages = num_rows * layout.cp_size
        self.allocator = LaneAllocator(layout, num_host_rows, record_reusable)
        self.state: npt.NDArray[np.uint8] = np.full(self.num_pages, NONE, np.uint8)
        self.copy: Pages = np.zeros(self.num_pages, np.int32)  # host page, 0: none
        self.ticket: npt.NDArray[np.int64] = np.zeros(self.num_pages, np.int64)
        self.loading: npt.NDArray[np.int64] = np.zeros(self.num_pages, np.int64)  # open load ticket, 0: none
        self._read_step: npt.NDArray[np.int64] = np.zeros(num_host_rows * layout.cp_size, np.int64)  # last step with a tail copy from a host page
        self._last_issued = 0
        self._last_retired = 0

    # steps: a host page that a tail copy reads is reusable when that step has retired

    def issued(self, step: int, tail_sources: Pages) -> None:
        self._last_issued = step
        self._read_step[tail_sources] = step

    def retired(self, step: int) -> None:
        self._last_retired = step
        self.allocator.retire(step)

    # what is where

    def is_ready(self, pages: Pages) -> Mask:
        return np.asarray(self.state[pages] == READY)

    def lacking(self, pages: Pages) -> Mask:
        """Pages without a copy, a reservation or an open backup ticket."""
        return np.asarray((self.state[pages] == NONE) & (self.ticket[pages] == NO_TICKET))

    def has_open_ticket(self, pages: Pages) -> Mask:
        return np.asarray(self.ticket[pages] > 0)

    def source_of(self, page: int) -> tuple[int, bool]:
        """Where the rows of a device page can be read now: (page, from the host)."""
        return (int(self.copy[page]), True) if self.loading[page] else (page, False)

    # moves

    def reserve(self, pages: Pages, hosts: Pages, is_written: bool) -> None:
        self._expect(pages, self.lacking(pages), "reserved")
        self._expect(pages, self.layout.lanes(pages) == self.layout.lanes(hosts), "reserved in another lane")
        self.state[pages] = RESERVED
        self.copy[pages] = hosts
        self.ticket[pages] = UNTAKEN_WRITTEN if is_written else UNTAKEN_WRITING

    def open(self, pages: Pages, ticket: int) -> None:
        """The copies go into the next plan."""
        self._expect(pages, (self.state[pages] == RESERVED) & (self.ticket[pages] < 0), "taken")
        self.ticket[pages] = ticket

    def commit(self, pages: Pages, hosts: Pages, ticket: int) -> Mask:
        """The ticket has ended. Returns the pages that have a twin now, bool [n]; the host pages of the others are freed."""
        self._expect(pages, self.ticket[pages] == ticket, f"ended by ticket {ticket}")
        kept: Mask = np.asarray((self.state[pages] == RESERVED) & (self.copy[pages] == hosts))
        self.state[pages[kept]] = READY
        self.ticket[pages] = NO_TICKET
        self.free(hosts[~kept])
        return kept

    def promote(self, pages: Pages, hosts: Pages) -> int:
        """Host-only pages get these device pages, computed or to be loaded. Returns how many copies of their own those had; they are given up."""
        self._expect(pages, self.loading[pages] == 0, "promoted")
        left = self.leave(pages)
        self.state[pages] = READY
        self.copy[pages] = hosts
        return left.num_ready + left.num_reserved

    def demote(self, pages: Pages) -> Pages:
        """The device pages go, their twins stay: returns them, host pages int32 [n]."""
        self._expect(pages, self.is_ready(pages) & (self.loading[pages] == 0), "demoted")
        hosts = self.copy[pages]
        self.state[pages] = NONE
        self.copy[pages] = 0
        return hosts

    def drop_copies(self, pages: Pages) -> None:
        self._expect(pages, self.is_ready(pages) & (self.loading[pages] == 0), "dropped from the host")
        self.free(self.demote(pages))

    def leave(self, pages: Pages) -> Left:
        """The device pages leave the tree or a request, or give up their copies for others."""
        self._expect(pages, self.loading[pages] == 0, "given back")
        state, is_open = self.state[pages], self.ticket[pages] > 0
        ready, reserved = state == READY, state == RESERVED
        self.free(self.copy[pages[ready | (reserved & ~is_open)]])
        self.ticket[pages[~is_open]] = NO_TICKET
        self.state[pages] = NONE
        self.copy[pages] = 0
        return Left(int(ready.sum()), int((reserved & is_open).sum()))

    def begin_load(self, pages: Pages, ticket: int) -> None:
        same_lane = self.layout.lanes(pages) == self.layout.lanes(self.copy[pages])
        self._expect(pages, self.is_ready(pages) & (self.loading[pages] == 0) & same_lane, "loaded")
        self.loading[pages] = ticket

    def end_load(self, pages: Pages, ticket: int) -> None:
        self._expect(pages, self.loading[pages] == ticket, f"loaded by ticket {ticket}")
        self.loading[pages] = 0

    def free(self, hosts: Pages) -> None:
        """Host pages that nothing holds any more; at once, but for those that a tail copy under way may read."""
        is_read = self._read_step[hosts] > self._last_retired
        self.allocator.free(hosts[~is_read], 0)
        self.allocator.free(hosts[is_read], self._last_issued)

    def free_counts(self) -> LaneCounts:
        return self.allocator.free_counts()

    def num_in_use(self) -> int:
        """Host pages that hold a copy or are reserved for one."""
        total = (self.allocator.num_rows - 1) * self.layout.cp_size
        return total - int((self.allocator.free_counts() + self.allocator.ticket_counts()).sum())

    def _expect(self, pages: Pages, holds: Mask, verb: str) -> None:
        if not holds.all():
            page = int(pages[~holds][0])
            raise LedgerError(f"page {page} (lane {self.layout.lane(page)}) is {verb}, but its host copy is {STATE_NAMES[self.state[page]]} "
                              f"(host page {self.copy[page]}), its backup ticket {self.ticket[page]}, its load ticket {self.loading[page]}")
