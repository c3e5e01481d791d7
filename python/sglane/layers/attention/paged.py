"""AttentionOps over the paged pools of one rank, for one step."""
import torch
from torch import Tensor

from sglane.distributed.exchange.local import Exchange
from sglane.forward.forward_batch import IndexInputs, SharedSelection
from sglane.layers.attention.blocked import attend_causal, attend_rows, merge_partials
from sglane.layers.attention.indexer import (
    ContinueSelection,
    ExtendSelection,
    SelectionTap,
    select_continues,
    select_extend,
    tap_continues,
    tap_extend,
)
from sglane.layers.attention.keys import ExtendKeys, bucket_rows
from sglane.layers.attention.mla import Heads, attend_extend
from sglane.layers.attention.plane import Plane
from sglane.layers.attention.step_view import ContinuePart, StepView

#: Key rows gathered at once for sparse decode rows.
SPARSE_TOKENS = 1 << 15


class PagedAttention:
    """Extends see the rows of all lanes (gather-KV); continues send their queries to all lanes and merge partial results (gather-Q)."""

    def __init__(self, kv: Plane, index: Plane | None, view: StepView, exchange: Exchange, tap: SelectionTap | None = None):
        """index: the index-key plane of a DSA model. tap: see SelectionTap."""
        self._kv = kv
        self._index = index
        self._view = view
        self._exchange = exchange
        self._tap = tap
        # Selection of the last full layer, kept for the IndexShare layers after it.
        self._extend_sets: list[ExtendSelection] = []
        self._continue_sets: ContinueSelection | None = None

    def gqa(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See AttentionOps."""
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = k.shape[1]
        rows = torch.cat((k.flatten(1), v.flatten(1)), 1)  # [n, 2 * Hkv * D]
        self._kv.write(layer, self._view.rows, self._view.offsets, rows)
        out = torch.empty_like(q) if self._view.extends or self._view.continues is None else None
        if out is not None and self._view.extends:
            keys = ExtendKeys(self._kv, layer, rows, self._view, self._exchange)
            for part in self._view.extends:
                if part.end > part.begin:
                    found = keys.rows(part).view(part.num_keys, 2, num_kv_heads, head_dim).permute(1, 2, 0, 3).contiguous()
                    out[part.begin:part.end] = attend_causal(q[part.begin:part.end], found[0], found[1], part.positions, scale)
        part = self._view.continues
        if part is not None:
            queries = self._gather_queries(q[part.begin:], part).view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            partials = self._partials(queries, head_dim, part)
            for bucket in part.buckets:
                found = bucket_rows(self._kv, layer, bucket).unflatten(2, (2, num_kv_heads, head_dim))  # [b, T, 2, Hkv, D]
                own = queries if bucket.whole else queries[bucket.index]
                partials.put(None if bucket.whole else bucket.index,
                             *attend_rows(own, found[:, :, 0], found[:, :, 1], bucket.hidden, scale, partials.wants_lse))
            merged = partials.merged().view(-1, num_heads, head_dim)
            if out is None:
                return merged
            out[part.begin:] = merged
        return out

    def mla(self, layer: int, q_nope: Tensor, q_rope: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float,
            index: IndexInputs | SharedSelection | None) -> Tensor:
        """See AttentionOps."""
        view = self._view
        heads = Heads(w_uk, w_uv, scale)
        self._kv.write(layer, view.rows, view.offsets, kv)
        if isinstance(index, IndexInputs):
            self._select(layer, index)
        sparse = index is not None
        out = q_nope.new_empty((*q_nope.shape[:2], w_uv.shape[1]))
        if view.extends:
            keys = ExtendKeys(self._kv, layer, kv, view, self._exchange)
            for i, part in enumerate(view.extends):
                if part.end > part.begin:
                    here = slice(part.begin, part.end)
                    selection = self._extend_sets[i] if sparse else ExtendSelection(part.end - part.begin, None)
                    out[here] = attend_extend(q_nope[here], q_rope[here], keys.rows(part), part.positions, heads, selection)
        if view.continues is not None:
            here = slice(view.continues.begin, None)
            selected = self._continue_sets if sparse else None
            out[here] = self._mla_continues(layer, torch.cat((q_nope[here], q_rope[here]), -1), heads, view.continues, selected)
        return out

    def _mla_continues(self, layer: int, q: Tensor, heads: Heads, part: ContinuePart, selected: ContinueSelection | None) -> Tensor:
        """q [c, H, dn + dr] of the continues at home here; returns [c, H, dv]."""
        queries = heads.absorb(self._gather_queries(q, part)).unsqueeze(1)  # [C, 1, H, ck + dr]
        partials = self._partials(queries, heads.latent_dim, part)
        if selected is None:
            for bucket in part.buckets:
                found = bucket_rows(self._kv, layer, bucket).unsqueeze(2)  # [b, T, 1, ck + dr]
                own = queries if bucket.whole else queries[bucket.index]
                partials.put(None if bucket.whole else bucket.index,
                             *attend_rows(own, found, found[..., :heads.latent_dim], bucket.hidden, heads.scale, partials.wants_lse))
        else:
            some = (~selected.hidden[:, 0]).nonzero()[:, 0]  # an empty lane has nothing to add
            for index in some.split(max(1, SPARSE_TOKENS // selected.rows.shape[1])):
                found = self._kv.tokens(layer, selected.rows[index], selected.offsets[index]).unsqueeze(2)
                partials.put(index, *attend_rows(queries[index], found, found[..., :heads.latent_dim], selected.hidden[index], heads.scale,
                                                 partials.wants_lse))
        return heads.values(partials.merged().squeeze(1).to(q.dtype))

    def _select(self, layer: int, index: IndexInputs) -> None:
        """Write the index keys of this layer and choose the keys of every query of the step."""
        view, plane = self._view, self._index
        assert plane is not None, f"layer {layer} has an indexer, but there is no index plane"
        keys = index.k.to(plane.buffer.dtype)
        plane.write(index.layer, view.rows, view.offsets, keys)
        q = index.q.float() * index.scale
        if view.extends:
            source = ExtendKeys(plane, index.layer, keys, view, self._exchange)
            self._extend_sets = []
            for part in view.extends:
                here = slice(part.begin, part.end)
                found = source.rows(part) if part.end > part.begin else keys[:0]
                self._extend_sets.append(select_extend(q[here], index.weights[here], found, part.positions, index.topk))
        part = view.continues
        if part is not None:
            self._continue_sets = None  # all keys
            if part.longest > index.topk:
                packed = torch.cat((q[part.begin:].flatten(1), index.weights[part.begin:]), 1)  # [c, Hi * Di + Hi]
                packed = self._gather_queries(packed, part)
                num_heads, dim = q.shape[1:]
                self._continue_sets = select_continues(packed[:, :num_heads * dim].view(-1, num_heads, dim), packed[:, num_heads * dim:], plane,
                                                       index.layer, part, index.topk, self._exchange)
        if self._tap is not None:
            self._report(layer, self._tap)

    def _report(self, layer: int, tap: SelectionTap) -> None:
        for part, selection in zip(self._view.extends, self._extend_sets):
            tap_extend(tap, layer, part, selection)
        part = self._view.continues
        if part is not None and self._continue_sets is not None:
            tap_continues(tap, layer, part, self._continue_sets)
        elif part is not None:
            for slot, position in zip(part.slots, part.positions):
                tap(layer, int(slot), position.reshape(1), None)

    def _gather_queries(self, q: Tensor, part: ContinuePart) -> Tensor:
        """q [c, ...] at home here; returns [C, ...] of all ranks."""
        return self._exchange.gather_rows(q, part.max_home, part.inverse)

    def _partials(self, queries: Tensor, value_dim: int, part: ContinuePart) -> "Partials":
        return Partials(queries, value_dim, part.home, self._exchange)


class Partials:
    """Results of decode rows: this lane's, then merged over lanes."""

    def __init__(self, queries: Tensor, value_dim: int, home: Tensor, exchange: Exchange):
        """queries [C, Hkv, G, D]."""
        self.wants_lse = exchange.size > 1
        self._exchange = exchange
        self._home = home
        self._type = queries.dtype
        if not self.wants_lse:
            self._o = queries.new_empty((*queries.shape[:3], value_dim))  # every continue has keys here
            return
        # The last column is the log-sum-exp, so that one collective carries both.
        self._o = queries.new_zeros((*queries.shape[:3], value_dim + 1), dtype=torch.float32)
        self._o[..., -1] = float("-inf")

    def put(self, index: Tensor | None, o: Tensor, lse: Tensor | None) -> None:
        """Results of the continues `index` [b], None: of all: o [b, Hkv, G, Dv], lse [b, Hkv, G]."""
        found = o if lse is None else torch.cat((o, lse.unsqueeze(-1)), -1)
        if index is None:
            self._o = found
        else:
            self._o[index] = found

    def merged(self) -> Tensor:
        """[c, Hkv, G, Dv] of the continues at home here. Every rank must call it."""
        if not self.wants_lse:
            return self._o
        every = self._exchange.all_gather(self._o)[:, self._home]  # [N, c, Hkv, G, Dv + 1]
        return merge_partials(every[..., :-1], every[..., -1]).to(self._type)
