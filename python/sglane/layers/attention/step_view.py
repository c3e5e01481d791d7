"""Where the keys of a step are: index tensors that are computed once per step and used by every layer and plane."""
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglane.forward.token_split import Entry, TokenSplit
from sglane.layers.attention.cost import decode_buckets
from sglane.layers.attention.prefix import PrefixPlan, plan_prefix


@dataclass(frozen=True)
class ExtendPart:
    """One extend as seen by this rank."""

    slot: int
    begin: int  # local tokens [begin, end) belong to it; may be empty
    end: int
    positions: np.ndarray  # int64 [end - begin]
    start: int  # tokens of the slot before this step
    first: int  # rows [first, first + num_keys - start) of the gathered current rows are its new tokens
    num_keys: int  # tokens of the slot after this step


@dataclass(frozen=True)
class CurrentRows:
    """How the rows of this step's extends travel, for Exchange.gather_rows."""

    num_local: int  # the first local tokens are those of extends
    max_length: int  # of the rank that has most
    inverse: Tensor  # int64 [tokens of all extends]


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
    current: CurrentRows
    prefix: PrefixPlan
    continues: ContinuePart | None

    @property
    def longest_extend(self) -> int:
        """Keys of the longest extend, 0 without any."""
        return max((part.num_keys for part in self.extends), default=0)


def build_view(entries: list[Entry], num_extends: int, split: TokenSplit, rank: int, cp_size: int, page_size: int,
               device: torch.device, scratch_tokens: int) -> StepView:
    """entries: `num_extends` extends, then continues of one token each. scratch_tokens: see plan_prefix."""
    local = split.local(rank)
    bounds = np.searchsorted(split.entries[local], np.arange(len(entries) + 1))  # local tokens of entry e: [bounds[e], bounds[e + 1])
    extends, first = [], 0
    for e, entry in enumerate(entries[:num_extends]):
        begin, end = int(bounds[e]), int(bounds[e + 1])
        extends.append(ExtendPart(entry.slot, begin, end, split.positions[local[begin:end]], entry.start, first, entry.start + entry.num_tokens))
        first += entry.num_tokens
    continues = None
    if len(entries) > num_extends:
        continues = _continue_part(entries[num_extends:], int(bounds[num_extends]), rank, cp_size, page_size, device)
    return StepView(len(local), page_size, torch.from_numpy(split.rows[local]).to(device), torch.from_numpy(split.offsets[local]).to(device),
                    extends, _current_rows(split, first, int(bounds[num_extends]), cp_size, device),
                    plan_prefix(entries[:num_extends], page_size, cp_size, scratch_tokens, device), continues)


def _current_rows(split: TokenSplit, num_tokens: int, num_local: int, cp_size: int, device: torch.device) -> CurrentRows:
    """The first `num_tokens` of the step, `num_local` of them here."""
    if cp_size == 1 or num_tokens == 0:
        return CurrentRows(num_local, num_local, torch.empty(0, dtype=torch.int64, device=device))  # nothing moves
    lanes = np.empty(len(split.order), np.int64)
    lanes[split.order] = np.repeat(np.arange(cp_size), np.diff(split.bounds))
    inverse, max_length = padded_places(lanes[:num_tokens], cp_size)
    return CurrentRows(num_local, max_length, torch.from_numpy(inverse).to(device))


def padded_places(lanes: np.ndarray, cp_size: int) -> tuple[np.ndarray, int]:
    """lanes int64 [m]: the rank of each row. Returns int64 [m], each row's place in the ranks' padded parts one after another, and their length."""
    counts = np.bincount(lanes, minlength=cp_size)
    most = int(counts.max())
    places = np.empty(len(lanes), np.int64)
    order = np.argsort(lanes, kind="stable")
    places[order] = np.arange(len(lanes)) - (np.cumsum(counts) - counts)[lanes[order]] + lanes[order] * most
    return places, most


def _continue_part(entries: list[Entry], begin: int, rank: int, cp_size: int, page_size: int, device: torch.device) -> ContinuePart:
    num_keys = np.array([entry.start + 1 for entry in entries], np.int64)
    num_pages = -(-num_keys // page_size)
    table = np.zeros((len(entries), int(num_pages.max())), np.int64)  # [C, P] page ids
    for i, entry in enumerate(entries):
        table[i, :num_pages[i]] = entry.pages[:num_pages[i]]
    last = np.arange(len(entries))
    homes = table[last, num_pages - 1] % cp_size
    inverse, max_home = padded_places(homes, cp_size)
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
