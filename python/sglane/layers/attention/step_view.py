"""Where the keys of a step are: index tensors that are computed once per step and used by every layer and plane."""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglane.forward.token_split import Entry, TokenSplit
from sglane.layers.attention.cost import decode_buckets


@dataclass(frozen=True)
class ExtendPart:
    """One extend as seen by this rank."""

    slot: int
    begin: int  # local tokens [begin, end) belong to it; may be empty
    end: int
    positions: np.ndarray  # int64 [end - begin]
    num_keys: int  # tokens of the slot after this step
    fresh: bool  # no prefix and all tokens are local: the layer's own rows are all keys
    pages: Tensor  # int64 [num_pages], indices for `ExtendKeys.rows`


@dataclass(frozen=True)
class PageGather:
    """Every page that the extends of the step attend to, owner by owner."""

    own_rows: Tensor  # int64 [M] pool rows of this rank, padded with row 0 to the longest rank's number


@dataclass(frozen=True)
class DecodeBucket:
    """Continues of similar length whose rows in this lane are gathered together.

    Whole pages are: a width that grew with every step would make oneDNN build new kernels for every step.
    """

    index: Tensor  # int64 [b] among the step's continues
    whole: bool  # all continues of the step, in their order
    rows: Tensor  # int64 [b, P] pool rows in this lane, padded with row 0
    page_starts: Tensor  # int64 [b, P] position of each page's first token
    stale: Tensor | None  # int64: gathered rows, of [b * P * page_size], that hold no valid token; None if there are none
    hidden: Tensor | None  # bool [b, P * page_size]: the same as a mask


@dataclass(frozen=True)
class ContinuePart:
    """All continues of the step, C on all ranks, c of them at home here."""

    begin: int  # local tokens [begin, begin + c)
    slots: np.ndarray  # int64 [C]
    positions: np.ndarray  # int64 [C] of the queries
    home: Tensor  # int64 [c] among the C
    max_home: int  # most continues at home on one rank
    inverse: Tensor  # int64 [C], for Exchange.gather_rows
    buckets: list[DecodeBucket]

    @property
    def longest(self) -> int:
        """Keys of the longest continue over all lanes."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True)
class StepView:
    """rows and offsets int64 [n]: where this rank writes its local tokens."""

    num_local: int
    page_size: int
    rows: Tensor
    offsets: Tensor
    extends: list[ExtendPart]
    gather: PageGather | None  # None on one rank
    continues: ContinuePart | None


def build_view(entries: list[Entry], num_extends: int, split: TokenSplit, rank: int, cp_size: int, page_size: int,
               device: torch.device) -> StepView:
    """entries: `num_extends` extends, then continues of one token each."""
    local = split.local(rank)
    bounds = np.searchsorted(split.entries[local], np.arange(len(entries) + 1))  # local tokens of entry e: [bounds[e], bounds[e + 1])
    gather, page_index = None, _own_page_index
    if cp_size > 1 and num_extends:
        gather, page_index = _plan_gather(entries[:num_extends], rank, cp_size, page_size, device)
    extends = []
    for e, entry in enumerate(entries[:num_extends]):
        begin, end = int(bounds[e]), int(bounds[e + 1])
        num_keys = entry.start + entry.num_tokens
        pages = entry.pages[:-(-num_keys // page_size)].astype(np.int64)
        extends.append(ExtendPart(entry.slot, begin, end, split.positions[local[begin:end]], num_keys,
                                  cp_size == 1 and entry.start == 0, torch.from_numpy(page_index(pages)).to(device)))
    continues = None
    if len(entries) > num_extends:
        continues = _continue_part(entries[num_extends:], int(bounds[num_extends]), rank, cp_size, page_size, device)
    return StepView(len(local), page_size, torch.from_numpy(split.rows[local]).to(device),
                    torch.from_numpy(split.offsets[local]).to(device), extends, gather, continues)


def _own_page_index(pages: np.ndarray) -> np.ndarray:
    return pages


def _plan_gather(entries: list[Entry], rank: int, cp_size: int, page_size: int,
                 device: torch.device) -> tuple[PageGather, Callable[[np.ndarray], np.ndarray]]:
    """The page gather of the step and a function from page ids to indices in its result [N * M]."""
    used = [entry.pages[:-(-(entry.start + entry.num_tokens) // page_size)] for entry in entries]
    pages = np.unique(np.concatenate(used)).astype(np.int64)  # shared prefix pages are fetched once
    lanes = pages % cp_size
    by_lane = np.argsort(lanes, kind="stable")
    counts = np.bincount(lanes, minlength=cp_size)
    most = int(counts.max())
    first = np.cumsum(counts) - counts
    place = np.empty(len(pages), np.int64)
    place[by_lane] = np.arange(len(pages)) - first[lanes[by_lane]] + lanes[by_lane] * most
    own = np.zeros(most, np.int64)
    mine = pages[lanes == rank] // cp_size
    own[:len(mine)] = mine

    def page_index(wanted: np.ndarray) -> np.ndarray:
        return place[np.searchsorted(pages, wanted)]

    return PageGather(torch.from_numpy(own).to(device)), page_index


def _continue_part(entries: list[Entry], begin: int, rank: int, cp_size: int, page_size: int, device: torch.device) -> ContinuePart:
    num_keys = np.array([entry.start + 1 for entry in entries], np.int64)
    num_pages = -(-num_keys // page_size)
    table = np.zeros((len(entries), int(num_pages.max())), np.int64)  # [C, P] page ids
    for i, entry in enumerate(entries):
        table[i, :num_pages[i]] = entry.pages[:num_pages[i]]
    last = np.arange(len(entries))
    homes = table[last, num_pages - 1] % cp_size
    home_counts = np.bincount(homes, minlength=cp_size)
    max_home = int(home_counts.max())
    order = np.argsort(homes, kind="stable")
    inverse = np.empty(len(entries), np.int64)
    inverse[order] = np.arange(len(entries)) - (np.cumsum(home_counts) - home_counts)[homes[order]] + homes[order] * max_home
    buckets = _lane_buckets(table, num_keys, num_pages, rank, cp_size, page_size, device)
    return ContinuePart(begin, np.array([entry.slot for entry in entries], np.int64), num_keys - 1,
                        torch.from_numpy(np.flatnonzero(homes == rank)).to(device), max_home, torch.from_numpy(inverse).to(device), buckets)


def _lane_buckets(table: np.ndarray, num_keys: np.ndarray, num_pages: np.ndarray, rank: int, cp_size: int, page_size: int,
                  device: torch.device) -> list[DecodeBucket]:
    """table int64 [C, P]. In a lane, a slot is the sequence of its pages there; only the last one may be partly filled."""
    page_at = np.arange(table.shape[1])
    mine = (page_at[None] < num_pages[:, None]) & (table % cp_size == rank)  # [C, P]
    lane_pages = mine.sum(1)
    packed = np.argsort(~mine, axis=1, kind="stable")  # [C, P]: this lane's pages first, in order of position
    filled = np.minimum(num_keys[:, None] - page_at[None] * page_size, page_size)
    lane_keys = np.where(mine, filled, 0).sum(1)
    some, every = np.flatnonzero(lane_pages), np.arange(len(table))
    buckets = []
    for group in decode_buckets(lane_pages[some], page_size):
        whole = len(group) == len(table)
        index = every if whole else some[group]
        width = int(lane_pages[index].max())
        place = packed[index, :width]
        valid = np.arange(width)[None] < lane_pages[index][:, None]
        rows = np.where(valid, np.take_along_axis(table[index], place, 1) // cp_size, 0)
        hidden = np.arange(width * page_size)[None] >= lane_keys[index][:, None]  # [b, P * page_size]
        buckets.append(DecodeBucket(
            torch.from_numpy(index).to(device), whole, torch.from_numpy(rows).to(device), torch.from_numpy(place * page_size).to(device),
            torch.from_numpy(np.flatnonzero(hidden)).to(device) if hidden.any() else None,
            torch.from_numpy(hidden).to(device) if hidden.any() else None))
    return buckets
