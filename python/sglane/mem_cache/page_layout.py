"""Where pages live, and how capacity is asked for: page ids, lanes, demands and shortfalls.

A page id is the same everywhere. `lane(p) = p % cp_size` is the rank that stores it, `row(p) = p // cp_size` its place in that rank's
buffers; nothing is stored to know an owner. Row 0 of each lane is a sink for padded writes and is never handed out.
"""
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LaneCounts = npt.NDArray[np.int64]  # [cp_size] number of something in each lane
Pages = npt.NDArray[np.int32]  # [n] page ids, in token order
Lanes = npt.NDArray[np.int32]  # [n] owner lane of each page to allocate

NO_PAGES: Pages = np.empty(0, np.int32)
NO_PAGES.setflags(write=False)


class LedgerError(AssertionError):
    """A broken invariant of the KV bookkeeping; the message names pages, lanes and states."""


@dataclass(frozen=True)
class PageLayout:
    """page_size: tokens of a page. cp_size: number of lanes."""

    page_size: int
    cp_size: int

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.cp_size < 1:
            raise ValueError(f"page_size {self.page_size} and cp_size {self.cp_size} must be positive")

    def lane(self, page: int) -> int:
        return page % self.cp_size

    def row(self, page: int) -> int:
        return page // self.cp_size

    def num_pages(self, num_tokens: int) -> int:
        """Pages that cover `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def lanes(self, pages: Pages) -> Lanes:
        """int32 [n] owner lane of each page."""
        return pages % np.int32(self.cp_size)

    def lane_counts(self, pages: Pages) -> LaneCounts:
        """int64 [cp_size] how many of the pages each lane owns."""
        if self.cp_size == 1:
            return np.array([len(pages)], np.int64)
        return np.bincount(pages % self.cp_size, minlength=self.cp_size)

    def no_counts(self) -> LaneCounts:
        return np.zeros(self.cp_size, np.int64)

    def describe(self, pages: Pages) -> str:
        """The first few pages with their lanes, for messages."""
        named = ", ".join(f"{page} (lane {self.lane(page)})" for page in pages[:8].tolist())
        return named + (f" and {len(pages) - 8} more" if len(pages) > 8 else "")


@dataclass(frozen=True)
class HostOptions:
    """The host tier. num_rows: host rows of each lane, the sink row included. min_hits: 1: pages are backed up when they are computed; more: when
    they have been hit that often since."""

    num_rows: int
    min_hits: int

    def __post_init__(self) -> None:
        if self.min_hits < 1:
            raise ValueError(f"min_hits {self.min_hits} must be positive")


@dataclass(frozen=True)
class Extent:
    """Valid tokens and the pages that cover them: the only bridge between the two units."""

    num_tokens: int
    pages: Pages


@dataclass(frozen=True)
class Demand:
    """Pages wanted: `fixed` in given lanes (tail copies, loads), `free` in any lane."""

    fixed: LaneCounts
    free: int

    def fits(self, available: LaneCounts) -> bool:
        rest = available - self.fixed
        return bool(rest.min() >= 0) and self.free <= int(rest.sum())

    def shortfall(self, available: LaneCounts, pending: bool) -> "Shortfall":
        rest = available - self.fixed
        return Shortfall(np.maximum(-rest, 0), max(self.free - int(np.maximum(rest, 0).sum()), 0), pending)


@dataclass(frozen=True)
class Shortfall:
    """An expected shortage, as a value: what is missing right now.

    pending: the pages exist but wait for unretired steps or open tickets; ask again when one of them has ended. Otherwise it is a real shortage,
    and nothing was changed and nothing evicted.
    """

    lanes: LaneCounts  # pages missing in each fixed lane
    free: int  # pages missing beyond those, in any lane
    pending: bool
