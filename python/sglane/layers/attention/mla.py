"""Multi-head latent attention: absorbed (in latent space) or expanded (keys and values per head), dense or over selected keys."""
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglane.layers.attention.blocked import CausalQueries, MergedRows, attend_causal, attend_partial, attend_rows
from sglane.layers.attention.cost import TILE_ELEMENTS, mla_expanded
from sglane.layers.attention.indexer import ExtendSelection
from sglane.layers.attention.keys import KeyPiece

#: Key rows gathered at once for the queries of one sparse tile.
SPARSE_TILE_TOKENS = 1 << 14


@dataclass(frozen=True)
class Heads:
    """The per-head projections of one layer. w_uk [H, dn, ck], w_uv [H, dv, ck]."""

    w_uk: Tensor
    w_uv: Tensor
    scale: float

    @property
    def latent_dim(self) -> int:
        return self.w_uk.shape[2]

    def dims(self, q: Tensor) -> tuple[int, int, int, int]:
        """(nope, rope, value, latent) per head, for q [n, H, dn + dr]."""
        nope = self.w_uk.shape[1]
        return nope, q.shape[2] - nope, self.w_uv.shape[1], self.latent_dim

    def absorb(self, q: Tensor) -> Tensor:
        """q [n, H, dn + dr] = [nope | roped]; returns [n, H, ck + dr], to be compared with cached rows."""
        nope = self.w_uk.shape[1]
        latent = torch.bmm(q[..., :nope].transpose(0, 1), self.w_uk)  # [H, n, ck]
        return torch.cat((latent.transpose(0, 1), q[..., nope:]), -1)

    def values(self, o: Tensor) -> Tensor:
        """o [n, H, ck] in latent space; returns [n, H, dv]."""
        return torch.bmm(o.transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)


def attend_extend(q_nope: Tensor, q_rope: Tensor, rows: Tensor, positions: np.ndarray, heads: Heads, selection: ExtendSelection) -> Tensor:
    """q_nope [n, H, dn] and q_rope [n, H, dr] at ascending `positions` int64 [n], rows [T, ck + dr] of positions [0, T); returns [n, H, dv]."""
    q = torch.cat((q_nope, q_rope), -1)
    d = selection.num_dense
    out = q.new_empty((*q.shape[:2], heads.w_uv.shape[1]))
    if d:
        visible = rows[:int(positions[d - 1]) + 1]
        attend = _attend_expanded if mla_expanded(d, len(visible), heads.dims(q)) else _attend_absorbed
        out[:d] = attend(q[:d], visible, positions[:d], heads)
    if selection.chosen is not None:
        out[d:] = _attend_chosen(q[d:], rows, heads, selection.chosen)
    return out


class PieceByPiece:
    """attend_extend for keys that come in pieces."""

    def __init__(self, q: Tensor, positions: np.ndarray, heads: Heads, selection: ExtendSelection):
        """q [n, H, dn + dr] at ascending `positions` int64 [n]; selection.chosen holds positions of all pieces."""
        d = selection.num_dense
        self._dense, self._positions, self._heads, self._chosen = q[:d], positions[:d], heads, selection.chosen
        self._absorbed = heads.absorb(q[d:]).unsqueeze(1)  # [n - d, 1, H, ck + dr]
        num_heads, value_dim = q.shape[1], heads.w_uv.shape[1]
        self._dense_sum = MergedRows(d, num_heads, value_dim, q.device)
        self._chosen_sum = MergedRows(len(q) - d, num_heads, heads.latent_dim, q.device)

    def add(self, piece: KeyPiece) -> None:
        """Keys that were not seen before."""
        if len(self._dense):
            last = piece.last_visible(self._positions)
            if last[-1] >= 0:
                expanded = mla_expanded(len(last), int(last[-1]) + 1, self._heads.dims(self._dense))
                partial = _partial_expanded if expanded else _partial_absorbed
                self._dense_sum.put(*partial(self._dense, piece.rows[:int(last[-1]) + 1], last, self._heads))
        if self._chosen is not None:
            at = torch.from_numpy(piece.positions).to(self._chosen.device)
            step = max(1, SPARSE_TILE_TOKENS // self._chosen.shape[1])
            for begin in range(0, len(self._chosen), step):
                self._add_chosen(piece.rows, at, begin, self._chosen[begin:begin + step].long())

    def _add_chosen(self, rows: Tensor, at: Tensor, begin: int, chosen: Tensor) -> None:
        """at int64 [K]: positions of rows [K, ck + dr]; chosen int64 [m, k] of the queries from `begin` on."""
        place = torch.searchsorted(at, chosen).clamp_max_(len(at) - 1)
        here = at[place] == chosen
        some = here.any(1).nonzero()[:, 0]
        if not len(some):
            return
        order = (~here[some]).to(torch.int8).argsort(dim=1, stable=True)[:, :int(here.sum(1).max())]  # those that are here first
        hidden = ~here[some].gather(1, order)
        place = place[some].gather(1, order)
        found = rows.index_select(0, place.flatten()).view(*place.shape, 1, -1)  # [s, j, 1, ck + dr]
        o, lse = attend_rows(self._absorbed[begin + some].unsqueeze(1), found, found[..., :self._heads.latent_dim], hidden.unsqueeze(1),
                             self._heads.scale, True)
        assert lse is not None
        self._chosen_sum.put(o[:, 0, 0], lse[:, 0, 0], begin + some)

    def result(self, dtype: torch.dtype) -> Tensor:
        """[n, H, dv] in `dtype`, after all pieces."""
        return torch.cat((self._dense_sum.result()[0].to(dtype), self._heads.values(self._chosen_sum.result()[0].to(dtype))))


def _attend_expanded(q: Tensor, rows: Tensor, positions: np.ndarray, heads: Heads) -> Tensor:
    out = q.new_empty((len(q), len(heads.w_uv), heads.w_uv.shape[1]))
    queries = CausalQueries(positions)
    for some, keys, values in _expanded(q, rows, heads):
        out[:, some] = attend_causal(q[:, some], keys, values, queries, heads.scale)
    return out


def _partial_expanded(q: Tensor, rows: Tensor, last_visible: np.ndarray, heads: Heads) -> tuple[Tensor, Tensor]:
    parts = [attend_partial(q[:, some], keys, values, last_visible, heads.scale) for some, keys, values in _expanded(q, rows, heads)]
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _expanded(q: Tensor, rows: Tensor, heads: Heads) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Keys [h, T, dn + dr] and values [h, T, dv] of some heads at a time, so that they stay within the tile budget."""
    num_heads, _, latent_dim = heads.w_uk.shape
    latent, rope = rows[:, :latent_dim], rows[:, latent_dim:]
    step = max(1, TILE_ELEMENTS // (len(rows) * (q.shape[2] + heads.w_uv.shape[1])))
    for h in range(0, num_heads, step):
        keys = torch.matmul(latent, heads.w_uk[h:h + step].transpose(1, 2))  # [h, T, dn]
        keys = torch.cat((keys, rope.expand(len(keys), -1, -1)), -1)
        yield slice(h, h + step), keys, torch.matmul(latent, heads.w_uv[h:h + step].transpose(1, 2))


def _partial_absorbed(q: Tensor, rows: Tensor, last_visible: np.ndarray, heads: Heads) -> tuple[Tensor, Tensor]:
    keys = rows.unsqueeze(0)  # one kv head: [1, T, ck + dr]
    o, lse = attend_partial(heads.absorb(q), keys, keys[..., :heads.latent_dim], last_visible, heads.scale)
    return heads.values(o), lse


def _attend_absorbed(q: Tensor, rows: Tensor, positions: np.ndarray, heads: Heads) -> Tensor:
    keys = rows.unsqueeze(0)  # one kv head: [1, T, ck + dr]
    return heads.values(attend_causal(heads.absorb(q), keys, keys[..., :heads.latent_dim], CausalQueries(positions), heads.scale))


def _attend_chosen(q: Tensor, rows: Tensor, heads: Heads, chosen: Tensor) -> Tensor:
    """chosen int32 [n, k]: positions each query attends to."""
    absorbed = heads.absorb(q)[:, None, None]  # [n, 1, 1, H, ck + dr]
    out = q.new_empty((len(q), q.shape[1], heads.latent_dim))
    step = max(1, SPARSE_TILE_TOKENS // chosen.shape[1])
    for begin in range(0, len(q), step):
        index = chosen[begin:begin + step]
        found = rows.index_select(0, index.flatten()).view(*index.shape, 1, -1)  # [m, k, 1, ck + dr]
        o, _ = attend_rows(absorbed[begin:begin + step], found, found[..., :heads.latent_dim], None, heads.scale, False)
        out[begin:begin + step] = o[:, 0, 0]
    return heads.values(out)
