"""Which rank computes which token of a step. Pure numpy, a function of the plan and the (replicated) slot table only.

Global order of a step's tokens: entry by entry (extends, then continues), ascending positions inside an entry. A rank's
local order is the same order restricted to the tokens whose page lies in its lane.
"""
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Entry:
    """`num_tokens` tokens of one slot, fed at positions [start, start + num_tokens)."""

    slot: int
    start: int
    num_tokens: int
    pages: np.ndarray  # int32 [>= pages that cover start + num_tokens], the slot's row


@dataclass(frozen=True)
class TokenSplit:
    """T = tokens of the step on all ranks, N = ranks."""

    entries: np.ndarray  # int32 [T] entry of each token
    positions: np.ndarray  # int64 [T]
    rows: np.ndarray  # int64 [T] pool row in the owner's pool
    offsets: np.ndarray  # int64 [T] token inside the page
    order: np.ndarray  # int64 [T] global indices, lane by lane
    bounds: np.ndarray  # int64 [N + 1]; rank r computes order[bounds[r]:bounds[r + 1]]
    inverse: np.ndarray  # int64 [T] global token -> index in the padded gather [N * max_length]
    max_length: int  # tokens of the rank that has most

    def local(self, rank: int) -> np.ndarray:
        """int64 [n]: global indices of the tokens of `rank`, ascending; may be empty."""
        return self.order[self.bounds[rank]:self.bounds[rank + 1]]

    def lanes(self, tokens: np.ndarray) -> np.ndarray:
        """int64 [k]: the rank that computes each of the global tokens int64 [k]."""
        return self.inverse[tokens] // max(self.max_length, 1)


def split_tokens(entries: list[Entry], page_size: int, cp_size: int) -> TokenSplit:
    """Distribute the tokens of a step over the lanes that own their pages."""
    counts = np.array([entry.num_tokens for entry in entries], np.int64)
    total = int(counts.sum())
    entry_of = np.repeat(np.arange(len(entries), dtype=np.int32), counts)
    if total:
        starts = np.array([entry.start for entry in entries], np.int64)
        firsts = np.cumsum(counts) - counts
        positions = np.arange(total, dtype=np.int64) + np.repeat(starts - firsts, counts)
        pages = np.concatenate([_pages_of(entry, page_size) for entry in entries]).astype(np.int64)
    else:
        positions, pages = np.zeros(0, np.int64), np.zeros(0, np.int64)
    lanes = pages % cp_size
    lengths = np.bincount(lanes, minlength=cp_size).astype(np.int64)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    order = np.argsort(lanes, kind="stable").astype(np.int64)
    max_length = int(lengths.max()) if total else 0
    inverse = np.empty(total, np.int64)
    inverse[order] = np.arange(total) - bounds[lanes[order]] + lanes[order] * max_length
    return TokenSplit(entry_of, positions, pages // cp_size, positions % page_size, order, bounds, inverse, max_length)


def _pages_of(entry: Entry, page_size: int) -> np.ndarray:
    """int32 [num_tokens]: the page of each token of an entry."""
    if entry.num_tokens == 1:
        first = entry.start // page_size
        return entry.pages[first:first + 1]
    index = np.arange(entry.start, entry.start + entry.num_tokens) // page_size
    return entry.pages[index]


def window_rows(window: int, length: int, pages: np.ndarray, page_size: int, cp_size: int, limit: int) -> int:
    """Rows a continue may feed: at most `window`, up to the first page of another lane, inside the allocated pages and `limit` tokens.

    Equal on all ranks, since slot tables are replicated. 0: the slot is stalled in this step.
    """
    rows = min(window, limit - length, len(pages) * page_size - length)
    if rows <= 1:
        return max(rows, 0)
    lanes = pages[length // page_size:(length + rows - 1) // page_size + 1] % cp_size
    other = np.flatnonzero(lanes != lanes[0])
    if len(other):
        rows = min(rows, (length // page_size + int(other[0])) * page_size - length)
    return rows
