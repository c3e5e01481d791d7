"""The copies between device and host of adverse executors: each page pair is copied at any moment between the issue of its plan and the end of
its lane's part, and until then the target holds a marker.
"""
from collections import Counter
from dataclasses import dataclass

import numpy as np

from sglane.mem_cache.kv_ledger import KVLedger, LoadOrder

POISON, LOADING, STORING = -1, -2, -3  # contents of reusable pages and of targets that have not been copied yet


@dataclass(eq=False)
class Copy:
    """Open until all lanes have ended their part."""

    ticket: int
    is_load: bool
    sources: np.ndarray
    targets: np.ndarray
    expected: np.ndarray  # what the sources hold
    todo: list[int]  # indices of pairs
    waiting: list[int]  # lanes


class HostCopies:
    """pool: the device pages' contents, written by its owner too."""

    def __init__(self, ledger: KVLedger, pool: np.ndarray, num_host_rows: int):
        self.layout, self.ledger, self.device = ledger.layout, ledger, pool
        self.host = np.full((num_host_rows * self.layout.cp_size, self.layout.page_size), POISON, np.int64)
        self.open: list[Copy] = []
        self.plan_loads: list[LoadOrder] = []
        self.seen: Counter[str] = Counter()  # what has happened

    def plan_starts(self) -> list:
        """Poison; returns the plan's backups: those of earlier rows begin at once, the others when its rows are written."""
        backups = self.ledger.take_backups()
        self.host[self.ledger.drain_reusable_host()] = POISON
        return backups

    def loads_begin(self) -> None:
        for order in self.plan_loads:
            self.seen["loads"] += 1
            self._begin(order.ticket, True, order.host_pages, order.device_pages)
        self.plan_loads = []

    def backups_begin(self, backups: list) -> None:
        for order in backups:
            self.seen["backups of earlier rows" if order.is_written else "backups of rows being written"] += 1
            self._begin(order.ticket, False, order.device_pages, order.host_pages)

    def _begin(self, ticket: int, is_load: bool, sources: np.ndarray, targets: np.ndarray) -> None:
        lanes = self.layout.lanes(sources)
        assert len(sources) and (lanes == self.layout.lanes(targets)).all(), "a copy between lanes"
        assert min(sources.min(), targets.min()) >= self.layout.cp_size, "a copy of a sink row"
        assert len(np.unique(sources)) == len(np.unique(targets)) == len(sources), "a page twice in one order"
        pool = self.host if is_load else self.device
        expected = pool[sources].copy()
        (self.device if is_load else self.host)[targets] = LOADING if is_load else STORING
        self.open.append(Copy(ticket, is_load, sources, targets, expected, list(range(len(sources))), sorted(set(lanes.tolist()))))

    def some(self, rng: np.random.Generator) -> None:
        """Copy a few pairs of any open ticket."""
        if self.open:
            copy = self.open[rng.integers(len(self.open))]
            for index in [index for index in copy.todo if rng.random() < 0.5]:
                self._copy(copy, index)

    def wait_for(self, needs_load: int) -> None:
        """Executors read rows that this load, or one before it, brings."""
        for copy in self.open:
            if copy.is_load and copy.ticket <= needs_load:
                for index in list(copy.todo):
                    self._copy(copy, index)

    def end_one(self, rng: np.random.Generator) -> None:
        """A lane ends its part of any open ticket."""
        if not self.open:
            return
        copy = self.open[rng.integers(len(self.open))]
        lane = copy.waiting.pop(rng.integers(len(copy.waiting)))
        for index in [index for index in copy.todo if self.layout.lane(int(copy.sources[index])) == lane]:
            self.seen["late copies"] += 1
            self._copy(copy, index)
        if not copy.waiting:
            self.open.remove(copy)
        self.ledger.ticket_ended(copy.ticket, lane)

    def end_all(self) -> None:
        rng = np.random.default_rng(len(self.open))
        while self.open:
            self.end_one(rng)

    def _copy(self, copy: Copy, index: int) -> None:
        copy.todo.remove(index)
        source, target = copy.sources[index], copy.targets[index]
        ours, theirs = (self.host, self.device) if copy.is_load else (self.device, self.host)
        marker = LOADING if copy.is_load else STORING
        assert (ours[source] == copy.expected[index]).all(), f"ticket {copy.ticket}: page {source} was reused before its copy"
        assert (theirs[target] == marker).all(), f"ticket {copy.ticket}: page {target} was reused before its copy"
        theirs[target] = ours[source]

    def check_visible(self, host_pages: np.ndarray) -> None:
        """These host pages can be found: no copy to them is under way."""
        for copy in self.open:
            assert copy.is_load or not np.isin(host_pages, copy.targets).any(), f"ticket {copy.ticket} has not ended, its host pages are found"

    def is_loading(self, pages: np.ndarray) -> np.ndarray:
        """bool [n] pages whose rows have not been brought yet."""
        missing = [copy.targets[copy.todo] for copy in self.open if copy.is_load] + [order.device_pages for order in self.plan_loads]
        return np.isin(pages, np.concatenate([np.empty(0, np.int32), *missing]))
