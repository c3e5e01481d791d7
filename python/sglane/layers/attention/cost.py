"""Pure rules of the attention layers: which form is cheaper, how large a tile is, which decode rows go together."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Bytes of a tile's query rows per head element; larger tiles fall out of the CPU's cache.
TILE_ROW_BYTES = 256
#: Elements of the largest temporary of one tile.
TILE_ELEMENTS = 1 << 24
#: Key rows, padding included, gathered at once for decode rows.
GATHER_TOKENS = 1 << 15
#: New tokens of extends that send their queries in one step: every rank holds the selected sets and the partial results of all of them.
MOST_QUERIES = 256


class RowWidths(NamedTuple):
    """Elements that one token moves in one layer, if it moves."""

    key: int  # its cached row, index key included
    query: int  # queries of all heads, those of the indexer with their head weights included
    partial: int  # partial results with log-sum-exps, float32
    topk: int  # selected keys, 0: dense attention


def gathers_queries(extends: Sequence[tuple[int, int]], widths: RowWidths, num_ranks: int, num_bytes_per_element: int) -> list[bool]:
    """Which way each extend of a step goes, (prefix tokens, new tokens): True: its queries are gathered, False: keys are. Queries are where that
    moves fewer bytes, the shortest extends first, until there are MOST_QUERIES."""
    room = MOST_QUERIES
    chosen = [False] * len(extends)
    for i in sorted(range(len(extends)), key=lambda i: extends[i][1]):
        num_prefix, num_new = extends[i]
        if num_new <= room and queries_move_less(num_prefix, num_new, widths, num_ranks, num_bytes_per_element):
            chosen[i] = True
            room -= num_new
    return chosen


def queries_move_less(num_prefix: int, num_new: int, widths: RowWidths, num_ranks: int, num_bytes_per_element: int) -> bool:
    """True if sending the queries of an extend to all lanes, which answer with partial results (float32) and candidates of the selection (score and
    position), moves fewer bytes to each rank than sending it the rows of all lanes."""
    if num_ranks == 1 or num_prefix == 0:
        return False
    num_keys = num_prefix + num_new
    # In units of (ranks - 1) / ranks: rows and queries come from all other ranks together, answers from each of them.
    rows = num_keys * widths.key * num_bytes_per_element
    answers = num_ranks * (4 * widths.partial + 8 * min(widths.topk, num_keys))
    return num_new * (widths.query * num_bytes_per_element + answers) < rows


def mla_expanded(num_queries: int, num_keys: int, dims: tuple[int, int, int, int]) -> bool:
    """True if expanding keys and values of all heads costs fewer multiply-adds than attending in latent space.

    dims = (nope, rope, value, latent) per head. The number of heads cancels out.
    """
    nope, rope, value, latent = dims
    pairs = num_queries * num_keys - num_queries * (num_queries - 1) // 2
    expanded = pairs * (nope + rope + value) + num_keys * latent * (nope + value)
    absorbed = pairs * (2 * latent + rope) + num_queries * latent * (nope + value)
    return expanded < absorbed


def tile_shape(num_queries: int, num_keys: int, num_kv_heads: int, heads_per_kv: int, itemsize: int) -> tuple[int, int]:
    """(query rows, kv heads) of one tile, so that its scores stay within TILE_ELEMENTS where possible. itemsize: bytes of a score."""
    per_row = max(num_keys * heads_per_kv, 1)
    rows = TILE_ROW_BYTES // itemsize
    if num_queries <= 2 * rows:
        rows = num_queries  # a second tile would cost more than it saves at the diagonal
    rows = max(1, min(rows, TILE_ELEMENTS // per_row))
    heads = max(1, min(num_kv_heads, TILE_ELEMENTS // (per_row * rows)))
    return rows, heads


def decode_buckets(num_pages: np.ndarray, page_size: int) -> list[np.ndarray]:
    """Group decode rows by length, so that padding to the group's longest at most doubles its pages.

    num_pages int64 [b], each >= 1. Returns index arrays, longest rows first; each group's gather stays within
    GATHER_TOKENS unless a single row is longer.
    """
    order = np.argsort(-num_pages, kind="stable")
    groups: list[np.ndarray] = []
    first = 0
    while first < len(order):
        longest = int(num_pages[order[first]])
        most = max(1, GATHER_TOKENS // (longest * page_size))
        last = first + 1
        used = longest
        while last < len(order) and last - first < most:
            used += int(num_pages[order[last]])
            if used * 2 < longest * (last + 1 - first):
                break
            last += 1
        groups.append(order[first:last])
        first = last
    return groups
