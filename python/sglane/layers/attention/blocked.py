"""Attention kernels of plain torch: blocks of query rows against contiguous keys, decode rows, merging of partial results.

The query heads that share a kv head are rows of one matrix product. Masks select: a masked score becomes -inf before the
softmax, and callers pass finite rows only.
"""
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sglane.layers.attention.cost import tile_shape

#: Below this number of (entry, kv head) pairs, products of bfloat16 decode rows are dominated by their set-up.
FEW_MATRICES = 8
#: Bytes of keys from which copying them for products of bfloat16 decode rows takes longer than fused attention, which reads them where they lie.
MANY_KEY_BYTES = 1 << 23


@dataclass(frozen=True)
class QueryTile:
    """Queries [begin, end) of an extend against keys [0, num_keys); columns from `first_masked` on need the mask."""

    begin: int
    end: int
    num_keys: int
    first_masked: int
    mask: Tensor | None  # [end - begin, num_keys - first_masked], to be added: 0 or -inf; None: all visible


def query_tiles(positions: np.ndarray, num_rows: int, dtype: torch.dtype, device: torch.device) -> list[QueryTile]:
    """Cut queries at ascending positions int64 [n] into tiles of `num_rows`, each with its keys cut at its largest position.

    Positions may repeat, and -1 sees no key. dtype: of the scores. Adding a mask is three times faster than filling under one.
    """
    tiles = []
    for begin in range(0, len(positions), num_rows):
        at = positions[begin:begin + num_rows]
        num_keys, first_masked = int(at[-1]) + 1, int(at[0]) + 1
        mask = None
        if num_keys - first_masked == len(at) - 1 > 0 and (at[1:] > at[:-1]).all():
            mask = _triangle(len(at), dtype, device)
        elif first_masked < num_keys:
            mask = _additive(at[:, None] < np.arange(first_masked, num_keys)[None], dtype, device)
        tiles.append(QueryTile(begin, begin + len(at), num_keys, first_masked, mask))
    return tiles


class CausalQueries:
    """Queries at ascending positions. All layers of a step cut them in the same way, so that is done once."""

    def __init__(self, positions: np.ndarray):
        """positions int64 [n]."""
        self._positions = positions
        self._tiles: dict[tuple[int, torch.dtype, torch.device], list[QueryTile]] = {}

    def tiles(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> list[QueryTile]:
        """See query_tiles."""
        key = (num_rows, dtype, device)
        if key not in self._tiles:
            self._tiles[key] = query_tiles(self._positions, num_rows, dtype, device)
        return self._tiles[key]


@lru_cache(maxsize=64)
def _triangle(num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_rows, num_rows - 1]: row i of adjacent positions sees the first i of the keys after the first row's position."""
    rows = np.arange(num_rows)
    return _additive(rows[None, 1:] > rows[:, None], dtype, device)


def _additive(hidden: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0))).to(device, dtype)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, queries: CausalQueries, scale: float) -> Tensor:
    """q [n, H, D] at the positions of `queries`; k [Hkv, T, D] and v [Hkv, T, Dv] of positions [0, T). Returns [n, H, Dv]."""
    return _attend(q, k, v, queries, scale, None)


def attend_partial(q: Tensor, k: Tensor, v: Tensor, last_visible: np.ndarray, scale: float) -> tuple[Tensor, Tensor]:
    """Some of the keys of q [n, H, D], to be merged: k [Hkv, T, D], v [Hkv, T, Dv]; query i sees the keys [0, last_visible[i]], int64 [n]
    ascending, -1: none. Returns o [n, H, Dv] and the log-sum-exp float32 [n, H], -inf with o = 0 where there is no key."""
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    return _attend(q, k, v, CausalQueries(last_visible), scale, lse), lse


def _attend(q: Tensor, k: Tensor, v: Tensor, cut: CausalQueries, scale: float, lse: Tensor | None) -> Tensor:
    """lse float32 [n, H] is filled in; None: every query sees at least one key."""
    n, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, value_dim = v.shape
    group = num_heads // num_kv_heads
    rows, heads = tile_shape(n, num_keys, num_kv_heads, group, q.itemsize)
    grouped = (q * scale).view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    shape = (n, num_kv_heads, group, value_dim)
    out = q.new_empty(shape) if lse is None else q.new_zeros(shape)
    room = q.new_empty(heads * group * rows * num_keys)  # scores of one tile
    for tile in cut.tiles(rows, q.dtype, q.device):
        m = tile.end - tile.begin
        if tile.num_keys == 0:
            continue
        for h in range(0, num_kv_heads, heads):
            some = slice(h, h + heads)
            queries = grouped[some, :, tile.begin:tile.end].reshape(-1, group * m, head_dim)
            # The product with scattered keys makes a slower copy of its own; that with scattered values needs none.
            keys, values = k[some, :tile.num_keys].contiguous(), v[some, :tile.num_keys]
            scores = room[:len(queries) * group * m * tile.num_keys].view(-1, group * m, tile.num_keys)
            torch.bmm(queries, keys.transpose(1, 2), out=scores)
            if tile.mask is not None:
                scores.view(-1, m, tile.num_keys)[..., tile.first_masked:].add_(tile.mask)
            if lse is None:
                torch.softmax(scores, -1, out=scores)  # row by row, so in place; new memory for every tile would cost as much again
            else:
                scores, found = _weights(scores, values.dtype)
                lse.view(n, num_kv_heads, group)[tile.begin:tile.end, some] = found.view(-1, group, m).permute(2, 0, 1)
            o = torch.bmm(scores, values)  # [h, G * m, Dv]
            out[tile.begin:tile.end, some] = o.view(-1, group, m, value_dim).permute(2, 0, 1, 3)
    return out.view(n, num_heads, value_dim)


def _weights(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """scores [..., T]; returns their softmax in `dtype`, zeros for a row of -inf, and the log-sum-exp float32 [...]."""
    scores = scores.float()
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp().to(dtype), lse


def attend_rows(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """r query rows per entry over the same keys. q [b, r, Hkv, G, D], k [b, T, Hkv, D], v [b, T, Hkv, Dv], hidden bool [b, r, T] (True = masked) or
    None.

    Every query has at least one visible key. Returns o [b, r, Hkv, G, Dv] and, if wanted, the log-sum-exp float32 [b, r, Hkv, G];
    o is float32 then, else of q's type.
    """
    b, num_rows, num_kv_heads, group, head_dim = q.shape
    num_keys, value_dim = k.shape[1], v.shape[3]
    parts = (b, num_kv_heads, num_rows, group)
    q = q.transpose(1, 2).reshape(b, num_kv_heads, num_rows * group, head_dim)
    if not want_lse and _fused_is_faster(q, k, value_dim):
        visible = None
        if hidden is not None:
            visible = hidden.logical_not() if num_rows == 1 else hidden.logical_not().repeat_interleave(group, 1)
            visible = visible.unsqueeze(1)  # [b, 1, 1 or r * G, T]
        o = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), visible, scale=scale)
        return o.view(*parts, value_dim).transpose(1, 2), None
    queries = (q * scale).flatten(0, 1)
    keys = k.transpose(1, 2).reshape(b * num_kv_heads, num_keys, head_dim)
    values = v.transpose(1, 2).reshape(b * num_kv_heads, num_keys, value_dim)
    scores = _row_scores(queries, keys)  # [b * Hkv, r * G, T]
    if hidden is not None:
        scores.view(*parts, num_keys).masked_fill_(hidden[:, None, :, None], float("-inf"))
    if not want_lse:
        return torch.bmm(scores.softmax(-1), values).view(*parts, value_dim).transpose(1, 2), None
    weights, lse = _weights(scores, values.dtype)
    o = torch.bmm(weights, values).float()
    return o.view(*parts, value_dim).transpose(1, 2), lse.view(parts).transpose(1, 2)


def _fused_is_faster(q: Tensor, k: Tensor, value_dim: int) -> bool:
    """On CPU torch's fused attention reads strided keys without a copy (float32: up to 3.5 times faster); many small bfloat16 matrices are
    faster as products. It needs equal widths of keys and values."""
    if q.device.type != "cpu" or q.shape[3] != value_dim:
        return False
    return q.dtype == torch.float32 or len(q) * q.shape[1] < FEW_MATRICES or k.numel() * k.itemsize >= MANY_KEY_BYTES


def _row_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [B, G, D], keys [B, T, D]; returns [B, G, T] contiguous."""
    if queries.dtype == torch.bfloat16 and queries.device.type == "cpu" and len(queries) < FEW_MATRICES and queries.shape[1] < 16:
        # Few small matrices: oneDNN is up to 7 times faster with the long side as rows (1.3 times slower with many).
        return torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2).contiguous()
    return torch.bmm(queries, keys.transpose(1, 2))


def merge_partials(o: Tensor, lse: Tensor) -> Tensor:
    """Softmax over disjoint key sets. o float32 [N, ..., Dv], lse float32 [N, ...], -inf for an empty set; returns [..., Dv].

    A row that is empty everywhere gives zeros.
    """
    top = lse.amax(0)
    weights = (lse - top.masked_fill(top == float("-inf"), 0.0)).exp()  # [N, ...]
    total = weights.sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    return (o * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)


class MergedRows:
    """Partial results of query rows over disjoint key sets, merged as they come."""

    def __init__(self, num_rows: int, num_heads: int, value_dim: int, device: torch.device):
        self._o = torch.zeros((num_rows, num_heads, value_dim), device=device)
        self._lse = torch.full((num_rows, num_heads), float("-inf"), device=device)

    def put(self, o: Tensor, lse: Tensor, index: Tensor | None = None) -> None:
        """o [m, H, Dv], lse float32 [m, H] of the rows `index` int64 [m], None: of all."""
        before = (self._o, self._lse) if index is None else (self._o[index], self._lse[index])
        merged = merge_partials(torch.stack((before[0], o.float())), torch.stack((before[1], lse)))
        total = torch.logaddexp(before[1], lse)
        if index is None:
            self._o, self._lse = merged, total
        else:
            self._o[index], self._lse[index] = merged, total

    def result(self) -> tuple[Tensor, Tensor]:
        """float32: o [n, H, Dv], zeros where no key was seen, and the log-sum-exp [n, H]."""
        return self._o, self._lse
