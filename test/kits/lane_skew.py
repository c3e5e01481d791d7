"""Lanes that are unequally full, by the ledger's own verbs; and a watch over the owners of what it hands out."""
from typing import Any

import numpy as np

from sglane.mem_cache.kv_ledger import Holding, KVLedger
from sglane.mem_cache.page_layout import LaneCounts, Shortfall
from sglane.mem_cache.radix_key import token_key

HELD, LOCKED, CACHED = "held", "locked", "cached"


def occupy(ledger: KVLedger, lane: int, num_pages: int, kind: str, seed: int = 0) -> Holding | None:
    """Fill `num_pages` pages of one lane. held: private pages of a request that stays. locked: the same in the tree, leased. cached: in the tree,
    evictable (returns None). The lane must have the pages free, and no more requests at home than the others."""
    if not num_pages:
        return None
    size = ledger.layout.page_size
    tokens = np.random.default_rng([seed, lane]).integers(0, 1 << 20, num_pages * size).astype(np.int32)
    elsewhere: LaneCounts = np.full(ledger.layout.cp_size, 1 << 30, np.int64)
    elsewhere[lane] = 0
    holding = ledger.match(token_key(tokens), f"occupied {seed} {lane}", 0)
    assert not isinstance(ledger.admit(holding, size, elsewhere), Shortfall)
    for end in range(2 * size, num_pages * size + 1, size):
        assert not isinstance(ledger.extend(holding, end, decode=True, lane_tokens=elsewhere), Shortfall)
    assert set(ledger.layout.lanes(holding.pages).tolist()) == {lane}
    if kind == CACHED:
        ledger.release(holding, token_key(tokens))
        return None
    if kind == LOCKED:
        ledger.publish(holding, token_key(tokens))
    return holding


class OwnerWatch:
    """Checks every growth of a row: as many pages as asked for, of lanes that had them; decoding leaves its home only when that is short."""

    def __init__(self, ledger: KVLedger):
        self.num_moves = 0
        self.num_grown = 0
        self._ledger = ledger
        self._extend = ledger.extend
        ledger.extend = self.extend  # type: ignore[method-assign]

    def extend(self, holding: Holding, num_tokens: int, *, decode: bool, lane_tokens: LaneCounts) -> Any:
        layout, free, home = self._ledger.layout, self._ledger.free_counts(), holding.home_lane
        num_before, cached = len(holding.pages), self._cached()
        promised = self._ledger._supply._promised_to_others(holding.serial)
        got = self._extend(holding, num_tokens, decode=decode, lane_tokens=lane_tokens)
        if isinstance(got, Shortfall):
            return got
        evicted = cached - self._cached()
        assert len(holding.pages) == max(num_before, layout.num_pages(num_tokens)) == num_before + len(got)
        assert (layout.lane_counts(got) <= free + np.maximum(evicted, 0)).all(), "pages of a lane that had none"
        self.num_grown += len(got)
        if decode and len(got) and layout.lane(int(got[0])) != home:
            self.num_moves += 1
            assert free[home] <= promised[home], f"a request left lane {home}, which had {free[home]} free pages, {promised[home]} of them promised"
        return got

    def _cached(self) -> LaneCounts:
        device: Any = self._ledger.snapshot()["device"]
        return np.array(device["cached"])
