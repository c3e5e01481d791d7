"""DSA: which keys each query attends to. Scores are float32 and exist in tiles only; the selection is exact and the same on every lane."""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglane.distributed.exchange.local import Exchange
from sglane.layers.attention.cost import TILE_ELEMENTS
from sglane.layers.attention.keys import KeyPiece, bucket_rows, lane_pieces
from sglane.layers.attention.plane import Plane
from sglane.layers.attention.step_view import DecodeBucket, ExtendPart, LaneExtend, QueryPart
from sglane.layers.attention.topk import keep_best, merge_topk, select_topk

#: Queries whose candidates of all lanes are merged at once.
MERGE_ROWS = 64

#: Debug tap: (layer, slot, query positions int64 [m], selected key positions int64 [m, k], -1 padded; None = all causal keys).
#: With several lanes a query that is gathered is reported by each lane with its own keys.
SelectionTap = Callable[[int, int, np.ndarray, np.ndarray | None], None]


@dataclass(frozen=True)
class ExtendSelection:
    """The first `num_dense` queries attend to all causal keys, query i after them to positions `chosen[i - num_dense]`."""

    num_dense: int
    chosen: Tensor | None  # int32 [n - num_dense, topk]


@dataclass(frozen=True)
class LaneSelection:
    """The keys of each gathered query that lie in this lane."""

    rows: Tensor  # int64 [R, k] pool rows; padding: row 0
    offsets: Tensor  # int64 [R, k]
    hidden: Tensor  # bool [R, k] padding


def select_extend(q: Tensor, weights: Tensor, keys: Tensor, positions: np.ndarray, topk: int) -> ExtendSelection:
    """q float32 [n, Hi, Di] (scaled), weights float32 [n, Hi], keys [T, Di] of positions [0, T), ascending `positions` int64 [n]."""
    num_dense = int(np.searchsorted(positions, topk))  # queries at positions < topk have at most topk causal keys
    if num_dense == len(positions):
        return ExtendSelection(num_dense, None)
    keys = keys.float()
    chosen = torch.empty((len(positions) - num_dense, topk), dtype=torch.int32, device=q.device)
    rows = max(1, min(64, TILE_ELEMENTS // len(keys)))
    for begin in range(num_dense, len(positions), rows):
        at = positions[begin:begin + rows]
        visible = keys[:int(at[-1]) + 1]
        scores = index_scores(q[begin:begin + rows], weights[begin:begin + rows], visible)
        columns = torch.arange(len(visible), device=q.device)
        scores.masked_fill_(columns > torch.from_numpy(at).to(q.device).unsqueeze(1), float("-inf"))
        chosen[begin - num_dense:begin - num_dense + len(at)] = select_topk(scores, topk)
    return ExtendSelection(num_dense, chosen)


class RunningBest:
    """The best keys of queries whose keys come in pieces."""

    def __init__(self, q: Tensor, weights: Tensor, positions: np.ndarray, topk: int):
        """q float32 [m, Hi, Di] (scaled), weights float32 [m, Hi], ascending `positions` int64 [m]."""
        self._q, self._weights, self._positions, self._topk = q, weights, positions, topk
        self._scores = q.new_empty((len(q), 0))
        self._found = torch.empty((len(q), 0), dtype=torch.int64, device=q.device)

    def add(self, piece: KeyPiece) -> None:
        """Keys that were not seen before."""
        if not len(self._q):
            return
        keys = piece.rows.float()
        at = torch.from_numpy(piece.positions).to(keys.device)
        last = torch.from_numpy(piece.last_visible(self._positions)).to(keys.device)
        columns = torch.arange(len(keys), device=keys.device)
        parts = []
        rows = max(1, min(64, TILE_ELEMENTS // len(keys)))
        for begin in range(0, len(self._q), rows):
            here = slice(begin, begin + rows)
            scores = index_scores(self._q[here], self._weights[here], keys)
            scores.masked_fill_(columns > last[here].unsqueeze(1), float("-inf"))
            best = select_topk(scores, self._topk)
            candidates = torch.cat((self._scores[here], scores.gather(1, best)), 1), torch.cat((self._found[here], at[best]), 1)
            parts.append(keep_best(*candidates, self._topk))
        self._scores, self._found = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def result(self) -> tuple[Tensor, Tensor]:
        """Scores float32 [m, k], -inf for padding, and positions int64 [m, k], ascending; k = min(topk, keys)."""
        return self._scores, self._found


class RunningSelection:
    """select_extend for keys that come in pieces."""

    def __init__(self, q: Tensor, weights: Tensor, positions: np.ndarray, topk: int):
        self._num_dense = int(np.searchsorted(positions, topk))
        self._num_sparse = len(positions) - self._num_dense
        self._best = RunningBest(q[self._num_dense:], weights[self._num_dense:], positions[self._num_dense:], topk)

    def add(self, piece: KeyPiece) -> None:
        self._best.add(piece)

    def result(self) -> ExtendSelection:
        """After all pieces."""
        return ExtendSelection(self._num_dense, self._best.result()[1].to(torch.int32) if self._num_sparse else None)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q float32 [m, Hi, Di], weights float32 [m, Hi], keys float32 [T, Di]; returns float32 [m, T]."""
    m, num_heads, dim = q.shape
    block = max(256, TILE_ELEMENTS // (m * num_heads))
    scores = q.new_empty((m, len(keys)))
    flat = q.reshape(m * num_heads, dim)
    for begin in range(0, len(keys), block):
        part = (flat @ keys[begin:begin + block].T).relu_().view(m, num_heads, -1)
        scores[:, begin:begin + block] = torch.bmm(weights.unsqueeze(1), part).squeeze(1)
    return scores


def select_queries(q: Tensor, weights: Tensor, plane: Plane, layer: int, part: QueryPart, topk: int, exchange: Exchange) -> LaneSelection:
    """q float32 [R, Hi, Di] (scaled) and weights float32 [R, Hi] of all gathered queries of the step; this lane scores its own keys."""
    num_queries, k = len(part.slots), min(topk, part.longest)
    device = q.device
    scores = torch.full((num_queries, k), float("-inf"), device=device)
    rows, offsets, positions = (torch.zeros((num_queries, k), dtype=torch.int64, device=device) for _ in range(3))
    for bucket in part.buckets:
        found = _bucket_candidates(q, weights, plane, layer, bucket, k)
        count = found[0].shape[1]
        for target, values in zip((scores, rows, offsets, positions), found):
            target[bucket.index.view(-1), :count] = values
    for extend in part.extends:
        here = slice(extend.first, extend.first + len(extend.positions))
        found = _extend_candidates(q[here], weights[here], plane, layer, extend, k)
        for target, values in zip((scores, rows, offsets, positions), found):
            target[here, :values.shape[1]] = values
    if exchange.size == 1:
        return LaneSelection(rows, offsets, scores == float("-inf"))
    packed = torch.stack((scores.view(torch.int32), positions.to(torch.int32)))  # one collective for both
    gathered = exchange.all_gather(packed)  # int32 [N, 2, R, k]
    kept = [merge_topk(block[:, 0].contiguous().view(torch.float32), block[:, 1].long(), topk)[exchange.rank]
            for block in gathered.split(MERGE_ROWS, 2)]
    return _compact(rows, offsets, torch.cat(kept))


def _extend_candidates(q: Tensor, weights: Tensor, plane: Plane, layer: int, extend: LaneExtend, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as _bucket_candidates for the queries of one extend."""
    best = RunningBest(q, weights, extend.positions, k)
    for piece in lane_pieces(plane, layer, extend):
        best.add(piece)
    scores, positions = best.result()
    rows = extend.table[positions // plane.page_size]  # of padding: any, since _compact hides it
    return scores, rows, positions % plane.page_size, positions


def _bucket_candidates(q: Tensor, weights: Tensor, plane: Plane, layer: int, bucket: DecodeBucket,
                       k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best k keys of this lane: scores, rows, offsets, positions, each [b * r, min(k, num_keys)], ascending positions; hidden ones score -inf."""
    keys = bucket_rows(plane, layer, bucket).float()  # [b, T, Di]
    b, num_rows = bucket.index.shape
    products = torch.bmm(q[bucket.index].flatten(1, 2), keys.transpose(1, 2)).relu_()  # [b, r * Hi, T]
    products = products.view(b * num_rows, q.shape[1], -1)
    scores = torch.bmm(weights[bucket.index.view(-1)].unsqueeze(1), products).squeeze(1)  # [b * r, T]
    if bucket.hidden is not None:
        scores.masked_fill_(bucket.hidden.flatten(0, 1), float("-inf"))
    best = select_topk(scores, k)  # [b * r, k]
    best_scores = scores.gather(1, best)
    page, offset = best // plane.page_size, best % plane.page_size
    valid = best_scores > float("-inf")
    every_rows, page_starts = (x.repeat_interleave(num_rows, 0) if num_rows > 1 else x for x in (bucket.rows, bucket.page_starts))
    rows = every_rows.gather(1, page).masked_fill(~valid, 0)  # padding reads the zero row
    return best_scores, rows, offset, page_starts.gather(1, page) + offset


def _compact(rows: Tensor, offsets: Tensor, kept: Tensor) -> LaneSelection:
    """Move the kept entries of each row to the front and cut to the longest row (at least one column)."""
    order = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, :max(1, int(kept.sum(1).max()))]
    hidden = ~kept.gather(1, order)
    return LaneSelection(rows.gather(1, order).masked_fill(hidden, 0), offsets.gather(1, order), hidden)


def tap_extend(tap: SelectionTap, layer: int, part: ExtendPart, selection: ExtendSelection) -> None:
    """Report the sets of one extend."""
    if selection.num_dense:
        tap(layer, part.slot, part.positions[:selection.num_dense], None)
    if selection.chosen is not None:
        tap(layer, part.slot, part.positions[selection.num_dense:], selection.chosen.cpu().numpy().astype(np.int64))


def tap_queries(tap: SelectionTap, layer: int, part: QueryPart, selection: LaneSelection, page_size: int) -> None:
    """Report the sets of all gathered queries, this lane's keys only."""
    starts = {}  # (query, pool row) -> position of the page's first token
    for bucket in part.buckets:
        for rows, page_starts, queries in zip(bucket.rows.tolist(), bucket.page_starts.tolist(), bucket.index.tolist()):
            starts.update({(index, row): at for index in queries for row, at in zip(rows, page_starts) if row})
    for extend in part.extends:
        for i in range(len(extend.positions)):
            starts.update({(extend.first + i, row): depth * page_size for depth, row in enumerate(extend.table.tolist()) if row})
    for i, slot in enumerate(part.slots):
        found = [starts[i, row] + offset for row, offset, hidden in
                 zip(selection.rows[i].tolist(), selection.offsets[i].tolist(), selection.hidden[i].tolist()) if not hidden]
        tap(layer, int(slot), part.positions[i:i + 1], np.array([sorted(found)], np.int64))
