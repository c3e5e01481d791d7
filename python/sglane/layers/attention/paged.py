"""AttentionOps over the paged pools of one rank, for one step."""
import torch
from torch import Tensor

from sglane.distributed.exchange.local import Exchange
from sglane.forward.forward_batch import IndexInputs, SharedSelection
from sglane.forward.layer_hooks import OPEN_GATE, LayerGate
from sglane.layers.attention.blocked import CausalQueries, MergedRows, attend_causal, attend_partial, attend_rows, merge_partials
from sglane.layers.attention.indexer import (
    ExtendSelection,
    LaneSelection,
    RunningSelection,
    SelectionTap,
    select_extend,
    select_queries,
    tap_extend,
    tap_queries,
)
from sglane.layers.attention.keys import ExtendKeys, bucket_rows, lane_pieces
from sglane.layers.attention.mla import Heads, PieceByPiece, attend_extend
from sglane.layers.attention.plane import Plane
from sglane.layers.attention.prefetch import PrefixReader
from sglane.layers.attention.step_view import DecodeBucket, LaneExtend, QueryPart, StepView

#: Key rows gathered at once for sparse decode rows.
SPARSE_TOKENS = 1 << 15


class PagedAttention:
    """Extends see the rows of all lanes (gather-KV); continues, and short extends over long prefixes, send their queries to all lanes and merge
    partial results (gather-Q). A layer makes at most one call of each kind."""

    def __init__(self, kv: Plane, index: Plane | None, view: StepView, exchange: Exchange, prefix: PrefixReader,
                 tap: SelectionTap | None = None, gate: LayerGate = OPEN_GATE):
        """index: the index-key plane of a DSA model. prefix: the rows of earlier steps of the planes' names. tap: see SelectionTap. gate: passed
        before a layer of a plane is read, and before the first exchange about it: after that every lane's rows are there."""
        self._kv = kv
        self._index = index
        self._view = view
        self._exchange = exchange
        self._prefix = prefix
        self._tap = tap
        self._gate = gate
        self._places = kv.places(view.rows, view.offsets)
        self._queries = [CausalQueries(part.positions) for part in view.extends]
        # Selection of the last full layer, kept for the IndexShare layers after it.
        self._extend_sets: list[ExtendSelection] = []
        self._query_sets: LaneSelection | None = None

    def gqa(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See AttentionOps."""
        self._gate.wait(self._kv.name, layer)
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = k.shape[1]
        rows = torch.cat((k.flatten(1), v.flatten(1)), 1)  # [n, 2 * Hkv * D]
        self._kv.write(layer, self._places, rows)
        out = torch.empty_like(q) if self._view.extends or self._view.queries is None else None
        if out is not None and self._view.extends:
            self._gqa_extends(ExtendKeys(self._kv, layer, rows, self._view, self._exchange, self._prefix), q, num_kv_heads, scale, out)
        part = self._view.queries
        if part is not None:
            merged = self._gqa_queries(layer, q[part.local], num_kv_heads, scale, part)
            if out is None:
                return merged
            out[part.local] = merged
        return out

    def _gqa_queries(self, layer: int, q: Tensor, num_kv_heads: int, scale: float, part: QueryPart) -> Tensor:
        """q [r, H, D] of the gathered queries at home here; returns [r, H, D]."""
        num_heads, head_dim = q.shape[1:]
        gathered = self._gather_queries(q, part)  # [R, H, D]
        queries = gathered.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        partials = self._partials(queries, head_dim, part)
        for bucket in part.buckets:
            found = bucket_rows(self._kv, layer, bucket).unflatten(2, (2, num_kv_heads, head_dim))  # [b, T, 2, Hkv, D]
            partials.put(bucket, *attend_rows(bucket.of(queries), found[:, :, 0], found[:, :, 1], bucket.hidden, scale, partials.wants_lse))
        for extend in part.extends:
            own = gathered[extend.first:extend.first + len(extend.positions)]
            merged = MergedRows(*own.shape, q.device)
            for piece in lane_pieces(self._kv, layer, extend):
                found = piece.rows.unflatten(1, (2, num_kv_heads, head_dim)).permute(1, 2, 0, 3).contiguous()  # [2, Hkv, T, D]
                merged.put(*attend_partial(own, found[0], found[1], piece.last_visible(extend.positions), scale))
            partials.put_extend(extend, *merged.result())
        return partials.merged().reshape(-1, num_heads, head_dim)

    def _gqa_extends(self, keys: ExtendKeys, q: Tensor, num_kv_heads: int, scale: float, out: Tensor) -> None:
        """q and out [n, H, D] of all local tokens; those of extends are filled in."""
        view = self._view
        shape = (2, num_kv_heads, q.shape[2])
        if keys.is_whole:
            for i, part in enumerate(view.extends):
                if part.end > part.begin:
                    found = keys.whole(i).unflatten(1, shape).permute(1, 2, 0, 3)  # [2, Hkv, T, D]
                    out[part.begin:part.end] = attend_causal(q[part.begin:part.end], found[0], found[1], self._queries[i], scale)
            return
        sums = [MergedRows(part.end - part.begin, *q.shape[1:], q.device) for part in view.extends]
        for i, piece in keys.pieces():
            part = view.extends[i]
            found = piece.rows.unflatten(1, shape).permute(1, 2, 0, 3).contiguous()  # once: many tiles see all of a piece
            sums[i].put(*attend_partial(q[part.begin:part.end], found[0], found[1], piece.last_visible(part.positions), scale))
        for part, merged in zip(view.extends, sums):
            out[part.begin:part.end] = merged.result()[0]

    def mla(self, layer: int, q_nope: Tensor, q_rope: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float,
            index: IndexInputs | SharedSelection | None) -> Tensor:
        """See AttentionOps."""
        self._gate.wait(self._kv.name, layer)
        view = self._view
        heads = Heads(w_uk, w_uv, scale)
        self._kv.write(layer, self._places, kv)
        if isinstance(index, IndexInputs):
            self._select(layer, index)
        sparse = index is not None
        out = q_nope.new_empty((*q_nope.shape[:2], w_uv.shape[1]))
        if view.extends:
            self._mla_extends(ExtendKeys(self._kv, layer, kv, view, self._exchange, self._prefix), q_nope, q_rope, heads, sparse, out)
        if view.queries is not None:
            here = view.queries.local
            selected = self._query_sets if sparse else None
            out[here] = self._mla_queries(layer, torch.cat((q_nope[here], q_rope[here]), -1), heads, view.queries, selected)
        return out

    def _mla_extends(self, keys: ExtendKeys, q_nope: Tensor, q_rope: Tensor, heads: Heads, sparse: bool, out: Tensor) -> None:
        """q_nope, q_rope and out of all local tokens; those of extends are filled in."""
        parts = self._view.extends
        selections = self._extend_sets if sparse else [ExtendSelection(part.end - part.begin, None) for part in parts]
        if keys.is_whole:
            for i, (part, selection) in enumerate(zip(parts, selections)):
                if part.end > part.begin:
                    here = slice(part.begin, part.end)
                    out[here] = attend_extend(q_nope[here], q_rope[here], keys.whole(i), part.positions, heads, selection)
            return
        q = torch.cat((q_nope, q_rope), -1)
        sums = [PieceByPiece(q[part.begin:part.end], part.positions, heads, selection) for part, selection in zip(parts, selections)]
        for i, piece in keys.pieces():
            sums[i].add(piece)
        for part, merged in zip(parts, sums):
            out[part.begin:part.end] = merged.result(q.dtype)

    def _mla_queries(self, layer: int, q: Tensor, heads: Heads, part: QueryPart, selected: LaneSelection | None) -> Tensor:
        """q [r, H, dn + dr] of the gathered queries at home here; returns [r, H, dv]."""
        absorbed = heads.absorb(self._gather_queries(q, part))  # [R, H, ck + dr]
        queries = absorbed.unsqueeze(1)  # [R, 1, H, ck + dr]
        partials = self._partials(queries, heads.latent_dim, part)
        if selected is None:
            for bucket in part.buckets:
                found = bucket_rows(self._kv, layer, bucket).unsqueeze(2)  # [b, T, 1, ck + dr]
                partials.put(bucket, *attend_rows(bucket.of(queries), found, found[..., :heads.latent_dim], bucket.hidden, heads.scale,
                                                  partials.wants_lse))
            for extend in part.extends:
                own = absorbed[extend.first:extend.first + len(extend.positions)]
                merged = MergedRows(len(own), own.shape[1], heads.latent_dim, own.device)
                for piece in lane_pieces(self._kv, layer, extend):
                    keys = piece.rows.unsqueeze(0)  # one kv head: [1, T, ck + dr]
                    last = piece.last_visible(extend.positions)
                    merged.put(*attend_partial(own, keys, keys[..., :heads.latent_dim], last, heads.scale))
                partials.put_extend(extend, *merged.result())
        else:
            some = (~selected.hidden[:, 0]).nonzero()[:, 0]  # an empty lane has nothing to add
            for index in some.split(max(1, SPARSE_TOKENS // selected.rows.shape[1])):
                found = self._kv.tokens(layer, selected.rows[index], selected.offsets[index]).unsqueeze(2)
                partials.put(index, *attend_rows(queries[index].unsqueeze(1), found, found[..., :heads.latent_dim],
                                                 selected.hidden[index].unsqueeze(1), heads.scale, partials.wants_lse))
        return heads.values(partials.merged().squeeze(1).to(q.dtype))

    def _select(self, layer: int, index: IndexInputs) -> None:
        """Write the index keys of this layer and choose the keys of every query of the step."""
        view, plane = self._view, self._index
        assert plane is not None, f"layer {layer} has an indexer, but there is no index plane"
        self._gate.wait(plane.name, index.layer)
        keys = index.k.to(plane.buffer.dtype)
        plane.write(index.layer, plane.places(view.rows, view.offsets), keys)
        q = index.q.float() * index.scale
        if view.extends:
            self._extend_sets = self._select_extends(q, index, keys)
        part = view.queries
        if part is not None:
            self._query_sets = None  # all keys
            if part.longest > index.topk:
                packed = torch.cat((q[part.local].flatten(1), index.weights[part.local]), 1)  # [r, Hi * Di + Hi]
                packed = self._gather_queries(packed, part)
                num_heads, dim = q.shape[1:]
                self._query_sets = select_queries(packed[:, :num_heads * dim].view(-1, num_heads, dim), packed[:, num_heads * dim:], plane,
                                                  index.layer, part, index.topk, self._exchange)
        if self._tap is not None:
            self._report(layer, self._tap)

    def _select_extends(self, q: Tensor, index: IndexInputs, keys: Tensor) -> list[ExtendSelection]:
        """q float32 [n, Hi, Di] (scaled) and keys [n, Di] of all local tokens."""
        view, plane, topk = self._view, self._index, index.topk
        assert plane is not None
        if view.longest_extend <= topk:  # every query attends to all its keys
            return [ExtendSelection(part.end - part.begin, None) for part in view.extends]
        source = ExtendKeys(plane, index.layer, keys, view, self._exchange, self._prefix)
        if source.is_whole:
            return [select_extend(q[part.begin:part.end], index.weights[part.begin:part.end],
                                  source.whole(i) if part.end > part.begin else keys[:0], part.positions, topk)
                    for i, part in enumerate(view.extends)]
        running = [RunningSelection(q[part.begin:part.end], index.weights[part.begin:part.end], part.positions, topk) for part in view.extends]
        for i, piece in source.pieces():
            running[i].add(piece)
        return [selection.result() for selection in running]

    def _report(self, layer: int, tap: SelectionTap) -> None:
        for part, selection in zip(self._view.extends, self._extend_sets):
            tap_extend(tap, layer, part, selection)
        part = self._view.queries
        if part is not None and self._query_sets is not None:
            tap_queries(tap, layer, part, self._query_sets, self._view.page_size)
        elif part is not None:
            for slot, position in zip(part.slots, part.positions):
                tap(layer, int(slot), position.reshape(1), None)

    def _gather_queries(self, q: Tensor, part: QueryPart) -> Tensor:
        """q [r, ...] at home here; returns [R, ...] of all ranks."""
        return self._exchange.gather_rows(q, part.max_home, part.inverse)

    def _partials(self, queries: Tensor, value_dim: int, part: QueryPart) -> "Partials":
        return Partials(queries, value_dim, part.home, self._exchange)


class Partials:
    """Results of gathered queries: this lane's, then merged over lanes."""

    def __init__(self, queries: Tensor, value_dim: int, home: Tensor, exchange: Exchange):
        """queries [R, Hkv, G, D]."""
        self.wants_lse = exchange.size > 1
        self._exchange = exchange
        self._home = home
        self._type = queries.dtype
        if not self.wants_lse:
            self._o = queries.new_empty((*queries.shape[:3], value_dim))  # every query has keys here
            return
        # The last column is the log-sum-exp, so that one collective carries both.
        self._o = queries.new_zeros((*queries.shape[:3], value_dim + 1), dtype=torch.float32)
        self._o[..., -1] = float("-inf")

    def put(self, queries: DecodeBucket | Tensor, o: Tensor, lse: Tensor | None) -> None:
        """Results of the queries of a bucket, or int64 [b] of the step's: o [b, r, Hkv, G, Dv], lse [b, r, Hkv, G]."""
        found = (o if lse is None else torch.cat((o, lse.unsqueeze(-1)), -1)).flatten(0, 1)
        if not isinstance(queries, DecodeBucket):
            self._o[queries] = found
        elif queries.whole:
            self._o = found
        else:
            self._o[queries.index.view(-1)] = found

    def put_extend(self, extend: LaneExtend, o: Tensor, lse: Tensor) -> None:
        """Results of an extend's queries: float32 o [n, H, Dv], lse [n, H], -inf where this lane has no key."""
        here = self._o[extend.first:extend.first + len(o)]
        here.copy_(torch.cat((o, lse.unsqueeze(-1)), -1).view_as(here))

    def merged(self) -> Tensor:
        """[r, Hkv, G, Dv] of the queries at home here. Every rank must call it."""
        if not self.wants_lse:
            return self._o
        every = self._exchange.all_gather(self._o)[:, self._home]  # [N, r, Hkv, G, Dv + 1]
        return merge_partials(every[..., :-1], every[..., -1]).to(self._type)
