"""A ledger with a host tier and the least that a scheduler does with it: one step at a time, copies that end when the test says so."""
from types import SimpleNamespace

import numpy as np

from sglane.mem_cache.kv_ledger import HostOptions, KVLedger, Shortfall
from sglane.mem_cache.page_layout import PageLayout
from sglane.utils.page_span import check_copy_order


def key_of(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def host(planner, name):
    """Host pages of a class, over all lanes."""
    return sum(planner.ledger.snapshot()["host"][name])


class Planner:
    """Each copy order is checked; end() ends what is open."""

    def __init__(self, num_pages, num_host_pages, cp_size=1, page_size=4, min_hits=1, **more):
        self.layout = PageLayout(page_size, cp_size)
        self.rows, self.host_rows = num_pages // cp_size + 1, num_host_pages // cp_size + 1
        self.ledger = KVLedger(self.layout, self.rows, num_slots=4, host=HostOptions(self.host_rows, min_hits), **more)
        self.step = 0
        self.open = []  # (order, lane), in the order in which they were issued

    def issue(self, loads=()):
        """One plan with all copies that are due; its step does not retire."""
        backups = self.ledger.take_backups()
        self.step += 1
        self.ledger.issued(self.step)
        for order in [*backups, *loads]:
            sides = (order.host_pages, order.device_pages) if order in loads else (order.device_pages, order.host_pages)
            rows = (self.host_rows, self.rows) if order in loads else (self.rows, self.host_rows)
            check_copy_order(*sides, cp_size=self.layout.cp_size, num_source_rows=rows[0], num_target_rows=rows[1])
            self.open += [(order, lane) for lane in sorted(set(self.layout.lanes(order.device_pages).tolist()))]
        self.ledger.audit()
        return backups

    def retire(self):
        self.ledger.retired(self.step)
        self.ledger.audit()

    def end(self, index=None):
        """All that is open, or the part `index` of it."""
        for order, lane in list(self.open) if index is None else [self.open[index]]:
            self.open.remove((order, lane))
            self.ledger.ticket_ended(order.ticket, lane)
            self.ledger.audit()

    def admit(self, key, num_tokens=None):
        holding = self.ledger.match(key, "", len(key) - 1)
        found = SimpleNamespace(device=holding.num_cached_device, host=holding.num_cached_host)
        answer = self.ledger.admit(holding, len(key) if num_tokens is None else num_tokens, np.zeros(self.layout.cp_size, np.int64))
        self.ledger.audit()
        return holding, answer, found

    def compute(self, key, chunk=None):
        """A request that computes `key` in chunks and ends; all copies end too. Returns what it found."""
        holding, answer, found = self.admit(key, None if chunk is None else min(chunk, len(key)))
        assert not isinstance(answer, Shortfall)
        done = answer.num_cached_tokens if chunk is not None else len(key)
        loads = [] if answer.load is None else [answer.load]
        while True:
            end = len(key) if chunk is None else min(done + chunk, len(key))
            if end > len(holding.pages) * self.layout.page_size:
                self.ledger.extend(holding, end, decode=False, lane_tokens=np.zeros(self.layout.cp_size, np.int64))
            self.ledger.plan_backup(holding, key, end)
            self.issue(loads)
            self.ledger.publish(holding, key[:end])
            self.retire()
            loads, done = [], end
            if end == len(key):
                break
        self.ledger.release(holding, key)
        self.settle()
        return found

    def settle(self):
        self.issue()
        self.retire()
        self.end()

    def push_out(self, num_pages, start=10_000):
        """Another prompt takes this many pages of the device; nothing of it stays."""
        holding, answer, _ = self.admit(key_of(start, start + num_pages * self.layout.page_size))
        assert not isinstance(answer, Shortfall), answer
        self.ledger.release(holding, key_of(0, 0))
        self.ledger.audit()

    def finish(self):
        """Everything has ended; all pages of both tiers are free after a flush."""
        self.settle()
        self.ledger.flush()
        self.ledger.audit()
        state = self.ledger.snapshot()
        assert all(state[tier]["free"] == state[tier]["total"] for tier in ("device", "host")) and state["leases"] == 0
