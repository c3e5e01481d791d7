"""Where the keys of a step are: index tensors that are computed once per step and used by every layer and plane."""
from collections.abc import Callable, Sequence
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
    """How the rows of this step's extends travel, where keys are gathered, for Exchange.gather_rows."""

    local: Tensor | slice  # those of the local tokens
    max_length: int  # of the rank that has most
    inverse: Tensor  # int64 [tokens of the extends that gather keys]


@dataclass(frozen=True)
class DecodeBucket:
    """Continues of r rows each and of similar length, whose keys in this lane are gathered together, once for all rows of a continue.

    Whole pages are: a width that grew with every step would make oneDNN build new kernels for every step.
    """

    index: Tensor  # int64 [b, r] among the step's gathered queries
    whole: bool  # all of them, in their order
    rows: Tensor  # int64 [b, P] pool rows in this lane, padded with row 0
    page_starts: Tensor  # int64 [b, P] position of each page's first token
    stale: Tensor | None  # int64: gathered rows, of [b * P * page_size], that no query may see; None if there are none
    hidden: Tensor | None  # bool [b, r, P * page_size]: what each query may not see

    def of(self, queries: Tensor) -> Tensor:
        """queries [R, ...] of the step; returns [b, r, ...] of the bucket."""
        return queries.unflatten(0, self.index.shape) if self.whole else queries[self.index]


@dataclass(frozen=True)
class LaneExtend:
    """An extend whose queries are gathered, and its keys in this lane."""

    first: int  # its tokens are the rows [first, first + len(positions)) of the step's gathered queries
    positions: np.ndarray  # int64, of the queries
    table: Tensor  # int64 [P]: pool row of each of its pages, 0 if the page lies in another lane
    pieces: list[tuple[Tensor, np.ndarray]]  # pool rows int64 [p] with the positions int64 of their valid tokens, ascending


@dataclass(frozen=True)
class QueryPart:
    """All queries of the step that are gathered, R on all ranks, r of them at home here: those of some extends, then of all continues."""

    local: Tensor | slice  # those of the local tokens
    slots: np.ndarray  # int64 [R]
    positions: np.ndarray  # int64 [R]
    home: Tensor  # int64 [r] among the R
    max_home: int  # most queries at home on one rank
    inverse: Tensor  # int64 [R], for Exchange.gather_rows
    extends: list[LaneExtend]
    buckets: list[DecodeBucket]

    @property
    def longest(self) -> int:
        """Keys of the longest continue or extend over all lanes."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True)
class StepRules:
    """What holds for every step of a rank."""

    scratch_tokens: int  # prefix tokens that one layer holds at once, see plan_prefix
    #: (prefix tokens, new tokens) of a step's extends -> True: its queries are gathered, False: keys are. The same on every rank.
    gathers_queries: Callable[[Sequence[tuple[int, int]]], list[bool]]


@dataclass(frozen=True)
class StepView:
    """rows and offsets int64 [n]: where this rank writes its local tokens."""

    num_local: int
    page_size: int
    rows: Tensor
    offsets: Tensor
    extends: list[ExtendPart]  # those that gather keys
    current: CurrentRows
    prefix: PrefixPlan
    queries: QueryPart | None

    @property
    def longest_extend(self) -> int:
        """Keys of the longest extend, 0 without any."""
        return max((part.num_keys for part in self.extends), default=0)


@dataclass(frozen=True)
class StepRows:
    """The tokens of one forward, and where their keys are: the same for the target and the draft layer."""

    split: TokenSplit
    local: np.ndarray  # int64 [n] this rank's, by their place in the global order
    view: StepView


def build_view(entries: list[Entry], num_extends: int, split: TokenSplit, rank: int, cp_size: int, page_size: int,
               device: torch.device, rules: StepRules) -> StepView:
    """entries: `num_extends` extends, then continues, each with all its tokens in one lane."""
    local = split.local(rank)
    bounds = np.searchsorted(split.entries[local], np.arange(len(entries) + 1))  # local tokens of entry e: [bounds[e], bounds[e + 1])
    asking = [False] * num_extends
    if cp_size > 1:
        asking = rules.gathers_queries([(entry.start, entry.num_tokens) for entry in entries[:num_extends]])
    extends, first = [], 0
    for e, entry in enumerate(entries[:num_extends]):
        if not asking[e]:
            begin, end = int(bounds[e]), int(bounds[e + 1])
            extends.append(ExtendPart(entry.slot, begin, end, split.positions[local[begin:end]], entry.start, first, entry.start + entry.num_tokens))
            first += entry.num_tokens
    lane = _Lane(rank, cp_size, page_size, device)
    queries = None
    if any(asking):
        queries = _query_part(entries, np.array(asking), split, lane, rules.scratch_tokens)
    elif len(entries) > num_extends:
        queries = _continue_part(entries[num_extends:], int(bounds[num_extends]), lane)
    kept = [entry for entry, asks in zip(entries, asking) if not asks]
    return StepView(len(local), page_size, torch.from_numpy(split.rows[local]).to(device), torch.from_numpy(split.offsets[local]).to(device),
                    extends, _current_rows(split, np.array(asking, bool), int(bounds[num_extends]), lane),
                    plan_prefix(kept, page_size, cp_size, rules.scratch_tokens, device), queries)


@dataclass(frozen=True)
class _Lane:
    """The lane that a view is made for."""

    rank: int
    cp_size: int
    page_size: int
    device: torch.device


def _current_rows(split: TokenSplit, asking: np.ndarray, num_local: int, lane: _Lane) -> CurrentRows:
    """asking bool [extends]: queries are gathered; num_local: tokens of all extends here."""
    if lane.cp_size == 1 or asking.all():
        return CurrentRows(slice(0, num_local), num_local, torch.empty(0, dtype=torch.int64, device=lane.device))  # nothing moves
    num_tokens = int(np.searchsorted(split.entries, len(asking)))
    return CurrentRows(*_travel(split, np.flatnonzero(~asking[split.entries[:num_tokens]]), lane)[:3])


def _travel(split: TokenSplit, tokens: np.ndarray, lane: _Lane) -> tuple[Tensor | slice, int, Tensor, Tensor]:
    """tokens int64 [m], ascending global tokens. Returns which local tokens they are, max_length and inverse for Exchange.gather_rows, and those of
    the m that are here."""
    lanes = np.empty(len(split.order), np.int64)
    lanes[split.order] = np.repeat(np.arange(lane.cp_size), np.diff(split.bounds))
    inverse, most = padded_places(lanes[tokens], lane.cp_size)
    here = np.flatnonzero(lanes[tokens] == lane.rank)
    places = np.searchsorted(split.local(lane.rank), tokens[here])
    local: Tensor | slice = torch.from_numpy(places).to(lane.device)
    if not len(places) or places[-1] - places[0] == len(places) - 1:
        local = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)
    return local, most, torch.from_numpy(inverse).to(lane.device), torch.from_numpy(here).to(lane.device)


def padded_places(lanes: np.ndarray, cp_size: int) -> tuple[np.ndarray, int]:
    """lanes int64 [m]: the rank of each row. Returns int64 [m], each row's place in the ranks' padded parts one after another, and their length."""
    counts = np.bincount(lanes, minlength=cp_size)
    most = int(counts.max())
    places = np.empty(len(lanes), np.int64)
    order = np.argsort(lanes, kind="stable")
    places[order] = np.arange(len(lanes)) - (np.cumsum(counts) - counts)[lanes[order]] + lanes[order] * most
    return places, most


def _query_part(entries: list[Entry], asking: np.ndarray, split: TokenSplit, lane: _Lane, scratch_tokens: int) -> QueryPart:
    """asking bool [extends]: of these and of all continues."""
    chosen = np.concatenate((asking, np.ones(len(entries) - len(asking), bool)))
    tokens = np.flatnonzero(chosen[split.entries])
    local, most, inverse, home = _travel(split, tokens, lane)
    positions = split.positions[tokens]
    slots = np.array([entry.slot for entry in entries], np.int64)[split.entries[tokens]]
    extends, first = [], 0
    for entry in (entry for entry, asks in zip(entries, asking) if asks):
        extends.append(_lane_extend(entry, first, lane, scratch_tokens))
        first += entry.num_tokens
    buckets = _lane_buckets(entries[len(asking):], first, lane)
    return QueryPart(local, slots, positions, home, most, inverse, extends, buckets)


def _lane_extend(entry: Entry, first: int, lane: _Lane, scratch_tokens: int) -> LaneExtend:
    size, end = lane.page_size, entry.start + entry.num_tokens
    pages = entry.pages[:-(-end // size)].astype(np.int64)
    table = np.where(pages % lane.cp_size == lane.rank, pages // lane.cp_size, 0)
    depths = np.flatnonzero(table)
    per_piece = max(1, scratch_tokens // 2 // size)
    pieces = []
    for begin in range(0, len(depths), per_piece):
        some = depths[begin:begin + per_piece]
        every = (some[:, None] * size + np.arange(size)).ravel()
        pieces.append((torch.from_numpy(table[some]).to(lane.device), every[:np.searchsorted(every, end)]))
    return LaneExtend(first, np.arange(entry.start, end), torch.from_numpy(table).to(lane.device), pieces)


def _continue_part(entries: list[Entry], begin: int, lane: _Lane) -> QueryPart:
    """Continues only; their local tokens start at `begin`."""
    counts = np.array([entry.num_tokens for entry in entries], np.int64)
    starts = np.array([entry.start for entry in entries], np.int64)
    every = np.repeat(np.arange(len(entries)), counts)
    positions = starts[every] + np.arange(len(every)) - (np.cumsum(counts) - counts)[every]
    homes = np.array([int(entry.pages[entry.start // lane.page_size]) % lane.cp_size for entry in entries], np.int64)[every]
    inverse, max_home = padded_places(homes, lane.cp_size)
    return QueryPart(slice(begin, None), np.array([entry.slot for entry in entries], np.int64)[every], positions,
                     torch.from_numpy(np.flatnonzero(homes == lane.rank)).to(lane.device), max_home, torch.from_numpy(inverse).to(lane.device),
                     [], _lane_buckets(entries, 0, lane))


def _lane_buckets(entries: list[Entry], first: int, lane: _Lane) -> list[DecodeBucket]:
    """Continues; they are the step's queries from `first` on, and its last."""
    counts = np.array([entry.num_tokens for entry in entries], np.int64)
    firsts = first + np.cumsum(counts) - counts
    if len(counts) and (counts == counts[0]).all():
        return _equal_buckets(entries, firsts[:, None] + np.arange(counts[0]), first == 0, lane)
    buckets = []
    for num_rows in np.unique(counts).tolist():
        some = np.flatnonzero(counts == num_rows)
        index = firsts[some][:, None] + np.arange(num_rows)  # [C, r]
        buckets += _equal_buckets([entries[i] for i in some], index, False, lane)
    return buckets


def _equal_buckets(entries: list[Entry], index: np.ndarray, is_whole: bool, lane: _Lane) -> list[DecodeBucket]:
    """Continues of r rows each, index int64 [C, r]; is_whole: they are all queries of the step. In a lane, a slot is the sequence of its pages there;
    only the last ones may be partly filled."""
    cp_size, page_size, device = lane.cp_size, lane.page_size, lane.device
    starts = np.array([entry.start for entry in entries], np.int64)
    num_pages = -(-(starts + index.shape[1]) // page_size)
    table = np.zeros((len(entries), int(num_pages.max())), np.int64)  # [C, P]
    for row, entry, count in zip(table, entries, num_pages.tolist()):
        row[:count] = entry.pages[:count]
    page_at = np.arange(table.shape[1])
    mine = (page_at[None] < num_pages[:, None]) & (table % cp_size == lane.rank)  # [C, P]
    lane_pages = mine.sum(1)
    packed = np.argsort(~mine, axis=1, kind="stable")  # [C, P]: this lane's pages first, in order of position
    lane_keys = np.stack([np.where(mine, np.clip((starts + row)[:, None] - page_at * page_size, 0, page_size), 0).sum(1)
                          for row in range(1, index.shape[1] + 1)], 1)  # [C, r]
    some = np.flatnonzero(lane_pages)
    buckets = []
    for group in decode_buckets(lane_pages[some], page_size):
        is_all = is_whole and len(group) == len(table)
        chosen = np.arange(len(table)) if len(group) == len(table) else some[group]
        width = int(lane_pages[chosen].max())
        place = packed[chosen, :width]
        valid = np.arange(width)[None] < lane_pages[chosen][:, None]
        rows = np.where(valid, np.take_along_axis(table[chosen], place, 1) // cp_size, 0)
        hidden = np.arange(width * page_size) >= lane_keys[chosen][:, :, None]  # [b, r, P * page_size]
        stale = np.flatnonzero(hidden[:, -1])
        buckets.append(DecodeBucket(
            torch.from_numpy(index[chosen]).to(device), is_all, torch.from_numpy(rows).to(device), torch.from_numpy(place * page_size).to(device),
            torch.from_numpy(stale).to(device) if len(stale) else None, torch.from_numpy(hidden).to(device) if hidden.any() else None))
    return buckets
