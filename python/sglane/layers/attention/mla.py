"""Multi-head latent attention: absorbed (in latent space) or expanded (keys and values per head), dense or over selected keys."""
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglane.layers.attention.blocked import attend_causal, attend_rows
from sglane.layers.attention.cost import TILE_ELEMENTS, mla_expanded
from sglane.layers.attention.indexer import ExtendSelection

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
        dims = (q_nope.shape[2], q_rope.shape[2], heads.w_uv.shape[1], heads.latent_dim)
        attend = _attend_expanded if mla_expanded(d, len(visible), dims) else _attend_absorbed
        out[:d] = attend(q[:d], visible, positions[:d], heads)
    if selection.chosen is not None:
        out[d:] = _attend_chosen(q[d:], rows, heads, selection.chosen)
    return out


def _attend_expanded(q: Tensor, rows: Tensor, positions: np.ndarray, heads: Heads) -> Tensor:
    """Keys and values of some heads at a time, so that they stay within the tile budget."""
    num_heads, nope, latent_dim = heads.w_uk.shape
    value_dim = heads.w_uv.shape[1]
    latent, rope = rows[:, :latent_dim], rows[:, latent_dim:]
    out = q.new_empty((len(q), num_heads, value_dim))
    step = max(1, TILE_ELEMENTS // (len(rows) * (q.shape[2] + value_dim)))
    for h in range(0, num_heads, step):
        keys = torch.matmul(latent, heads.w_uk[h:h + step].transpose(1, 2))  # [h, T, dn]
        keys = torch.cat((keys, rope.expand(len(keys), -1, -1)), -1)
        values = torch.matmul(latent, heads.w_uv[h:h + step].transpose(1, 2))  # [h, T, dv]
        out[:, h:h + step] = attend_causal(q[:, h:h + step], keys, values, positions, heads.scale)
    return out


def _attend_absorbed(q: Tensor, rows: Tensor, positions: np.ndarray, heads: Heads) -> Tensor:
    keys = rows.unsqueeze(0)  # one kv head: [1, T, ck + dr]
    return heads.values(attend_causal(heads.absorb(q), keys, keys[..., :heads.latent_dim], positions, heads.scale))


def _attend_chosen(q: Tensor, rows: Tensor, heads: Heads, chosen: Tensor) -> Tensor:
    """chosen int32 [n, k]: positions each query attends to."""
    absorbed = heads.absorb(q).unsqueeze(1)  # [n, 1, H, ck + dr]
    out = q.new_empty((len(q), q.shape[1], heads.latent_dim))
    step = max(1, SPARSE_TILE_TOKENS // chosen.shape[1])
    for begin in range(0, len(q), step):
        index = chosen[begin:begin + step]
        found = rows.index_select(0, index.flatten()).view(*index.shape, 1, -1)  # [m, k, 1, ck + dr]
        o, _ = attend_rows(absorbed[begin:begin + step], found, found[..., :heads.latent_dim], None, heads.scale, False)
        out[begin:begin + step] = o.squeeze(1)
    return heads.values(out)
