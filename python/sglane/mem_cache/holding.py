"""One request's KV as the ledger sees it.

    MATCHED --admit--> ADMITTED --release--> ENDED
    MATCHED --cancel--> ENDED
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglane.mem_cache.page_layout import LedgerError, PageLayout, Pages
from sglane.mem_cache.radix_node import Node
from sglane.mem_cache.tree_walk import Match, TailSource

MATCHED, ADMITTED, ENDED = "matched", "admitted", "ended"


class TailCopyOrder(NamedTuple):
    """Copy the first rows of a page to another page of the same lane, at the start of the step. from_host: src_page is a host page."""

    src_page: int
    dst_page: int
    num_tokens: int
    from_host: bool


class LoadOrder(NamedTuple):
    """Copy host pages to device pages of the same lanes, pairwise, int32 [n] each. It is carried out whatever becomes of the request."""

    ticket: int
    host_pages: Pages
    device_pages: Pages


class BackupOrder(NamedTuple):
    """Copy device pages to host pages of the same lanes, pairwise, int32 [n] each. is_written: their rows are of earlier steps; else a layer is
    there when the step of the plan has computed it."""

    ticket: int
    device_pages: Pages
    host_pages: Pages
    is_written: bool


@dataclass(frozen=True)
class Admission:
    """pages: int32, the whole row. num_cached_tokens: rows that are valid (after the tail copy and the load)."""

    slot: int
    pages: Pages
    num_cached_tokens: int
    tail_copy: TailCopyOrder | None
    load: LoadOrder | None


@dataclass(frozen=True)
class RowChange:
    """Part of a row that now points at canonical pages. first_page: index inside the row, in pages."""

    first_page: int
    pages: Pages


class Holding:
    """Written by the ledger only, through the verbs below. Others read `pages`, `num_cached_tokens` (and its device and host part),
    `home_lane`, `slot` and `state`.

    The row's first `num_tree_pages` pages belong to the tree, the rest is private. The lease ends there, or `num_host_pages` further, which have
    no device page until the holding is admitted.
    """

    def __init__(self, serial: int, match: Match, layout: PageLayout) -> None:
        self.serial = serial
        self.state = MATCHED
        self.slot = -1  # -1: none
        self.num_cached_tokens = match.num_tokens
        self.lease: Node = match.node
        self.source: TailSource | None = match.source  # leased until the copy is issued
        self.num_tree_pages = len(match.pages)
        self.num_host_pages = len(match.host_pages)
        self._row = match.pages  # read-only; replaced by a larger one when the row grows
        self._num_pages = len(match.pages)
        self._cp_size = layout.cp_size
        self._page_size = layout.page_size
        self._count_tiers()

    @property
    def pages(self) -> Pages:
        """int32, the row so far; a view that is good until the next verb."""
        return self._row[: self._num_pages]

    @property
    def num_cached_device(self) -> int:
        """Cached tokens that are on the device, or on their way to it by an earlier load."""
        return self.num_cached_tokens - self.num_cached_host

    @property
    def home_lane(self) -> int:
        """Lane of the row's last page, 0 for an empty row."""
        return int(self._row[self._num_pages - 1]) % self._cp_size if self._num_pages else 0

    def lane_at(self, index: int) -> int:
        """Lane of the row's page `index`."""
        return int(self._row[index]) % self._cp_size

    @property
    def private_pages(self) -> Pages:
        return self.pages[self.num_tree_pages :]

    def expect(self, *states: str) -> None:
        if self.state not in states:
            raise LedgerError(f"holding {self.serial} is {self.state}, not {' or '.join(states)} (slot {self.slot})")

    def moved_to_device(self, pages: Pages) -> None:
        """The device part of the path is `pages` by now: others have loaded or computed some of the host part."""
        self.expect(MATCHED)
        self.num_host_pages -= len(pages) - self.num_tree_pages
        self._row, self._num_pages, self.num_tree_pages = pages, len(pages), len(pages)
        self._count_tiers()

    def cut_to_page(self) -> None:
        """Give up the part of the hit inside a page."""
        self.num_cached_tokens = (self.num_tree_pages + self.num_host_pages) * self._page_size
        self.source = None
        self._count_tiers()

    def cut_to_device(self, lease: Node) -> None:
        """Give up the part of the hit that is on the host; the lease ends at `lease` now."""
        self.lease, self.num_host_pages = lease, 0
        self.cut_to_page()

    def loaded(self, pages: Pages) -> None:
        """The tree's host-only pages of the hit have these device pages now."""
        self.grown(pages)
        self.num_tree_pages += len(pages)
        self.num_host_pages = 0

    def _count_tiers(self) -> None:
        """num_cached_host: cached tokens that have to be copied from the host first."""
        tail = self.source.num_tokens if self.source is not None and self.source.from_host else 0
        self.num_cached_host = self.num_host_pages * self._page_size + tail

    def admitted(self, slot: int, pages: Pages) -> None:
        self.expect(MATCHED)
        self.state, self.slot = ADMITTED, slot
        self.grown(pages)

    def grown(self, pages: Pages) -> None:
        """Append private pages to the row."""
        num_pages = self._num_pages + len(pages)
        if num_pages > len(self._row):
            row = np.empty(max(num_pages, min(2 * len(self._row), len(self._row) + 1024), 8), np.int32)
            row[: self._num_pages] = self.pages
            self._row = row
        self._row[self._num_pages : num_pages] = pages
        self._num_pages = num_pages

    def published(self, lease: Node, canonical: Pages, num_tree_pages: int) -> None:
        """The tree has the row's first `num_tree_pages` pages; `canonical` replace the first ones that were private."""
        self._row[self.num_tree_pages : self.num_tree_pages + len(canonical)] = canonical
        self.lease, self.num_tree_pages = lease, num_tree_pages

    def source_ended(self) -> None:
        self.source = None

    def ended(self) -> None:
        self.state, self.slot = ENDED, -1
        self._num_pages = self.num_tree_pages = 0
