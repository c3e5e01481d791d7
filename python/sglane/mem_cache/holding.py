"""One request's KV as the ledger sees it.

    MATCHED --admit--> ADMITTED --release--> ENDED
    MATCHED --cancel--> ENDED
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglane.mem_cache.page_layout import LedgerError, Pages
from sglane.mem_cache.radix_cache import Match, TailSource
from sglane.mem_cache.radix_node import Node

MATCHED, ADMITTED, ENDED = "matched", "admitted", "ended"


class TailCopyOrder(NamedTuple):
    """Copy the first rows of a page to another page of the same lane, at the start of the step."""

    src_page: int
    dst_page: int
    num_tokens: int


@dataclass(frozen=True)
class Admission:
    """pages: int32, the whole row. num_cached_tokens: rows that are valid (after the tail copy)."""

    slot: int
    pages: Pages
    num_cached_tokens: int
    tail_copy: TailCopyOrder | None


@dataclass(frozen=True)
class RowChange:
    """Part of a row that now points at canonical pages. first_page: index inside the row, in pages."""

    first_page: int
    pages: Pages


class Holding:
    """Written by the ledger only, through the verbs below. Others read `pages`, `num_cached_tokens` (and its device and host part),
    `home_lane`, `slot` and `state`.

    The row's first `num_tree_pages` pages belong to the tree (the lease ends there), the rest is private.
    """

    def __init__(self, serial: int, match: Match, cp_size: int) -> None:
        self.serial = serial
        self.state = MATCHED
        self.slot = -1  # -1: none
        self.num_cached_tokens = match.num_tokens
        self.num_cached_device = match.num_tokens
        self.lease: Node = match.node
        self.source: TailSource | None = match.source  # leased until the copy is issued
        self.num_tree_pages = len(match.pages)
        self._row = match.pages  # read-only; replaced by a larger one when the row grows
        self._num_pages = len(match.pages)
        self._cp_size = cp_size

    @property
    def pages(self) -> Pages:
        """int32, the row so far; a view that is good until the next verb."""
        return self._row[: self._num_pages]

    @property
    def num_cached_host(self) -> int:
        """Cached tokens that must be loaded from the host first."""
        return self.num_cached_tokens - self.num_cached_device

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

    def cut_to_page(self, page_size: int) -> None:
        """Give up the part of the hit inside a page."""
        self.num_cached_tokens = self.num_cached_device = self.num_tree_pages * page_size
        self.source = None

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
