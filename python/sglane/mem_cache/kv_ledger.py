"""The only door to KV for the scheduler. It joins the radix tree, the page allocators, the tickets of the host tier and the step stamps.

Everything is counted in valid tokens towards the caller and in pages inside. A shortage is a value (`Shortfall`), a broken invariant a
`LedgerError`. Pages of a row are either the tree's (under the holding's lease) or private; no page is ever both.
"""
from collections.abc import Callable

import numpy as np

from sglane.mem_cache.hiradix_cache import Residency
from sglane.mem_cache.holding import ADMITTED, MATCHED, Admission, BackupOrder, Holding, LoadOrder, RowChange, TailCopyOrder
from sglane.mem_cache.host_tier import HostTier
from sglane.mem_cache.lane_allocator import LaneAllocator
from sglane.mem_cache.ledger_audit import audit_ledger
from sglane.mem_cache.owner_policy import decode_owner, prefill_owners
from sglane.mem_cache.page_hash import page_hashes
from sglane.mem_cache.page_layout import NO_PAGES, Demand, HostOptions, LaneCounts, Lanes, LedgerError, PageLayout, Pages, Shortfall
from sglane.mem_cache.page_supply import PageSupply
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_key import BIGRAM_KEYS, TOKEN_KEYS, RadixKey, check_key
from sglane.mem_cache.radix_node import Node
from sglane.utils import fallback

__all__ = [
    "Admission", "BackupOrder", "Holding", "HostOptions", "KVLedger", "LedgerError", "LoadOrder", "RowChange", "Shortfall", "TailCopyOrder",
]


class KVLedger:
    """num_rows: rows of each lane, the sink row included. prefix_cache=False: no request finds or leaves anything in the tree.
    record_reusable: keep the list that drain_reusable() returns. bigram_keys: all keys are bigram keys (int64), else token keys (int32); a key of
    the other type raises ValueError before anything is changed. host: None without a host tier."""

    def __init__(
        self,
        layout: PageLayout,
        num_rows: int,
        num_slots: int,
        prefix_cache: bool = True,
        record_reusable: bool = False,
        bigram_keys: bool = False,
        host: HostOptions | None = None,
    ) -> None:
        self.layout = layout
        self.prefix_cache = prefix_cache
        self.num_rows = num_rows
        self.num_slots = num_slots
        self._allocator = LaneAllocator(layout, num_rows, record_reusable)
        residency = None if host is None else Residency(layout, num_rows, host.num_rows, record_reusable)
        self.key_kind = BIGRAM_KEYS if bigram_keys else TOKEN_KEYS
        self._tree = RadixCache(layout, self.key_kind.element_bytes, residency)
        self._supply = PageSupply(layout, self._allocator, self._tree, residency)
        self._host = None if host is None or residency is None else HostTier(layout, host.min_hits, residency, self._tree, self._supply)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._holdings: dict[int, Holding] = {}  # open ones, by serial number
        self._unissued: list[Holding] = []  # admitted with a tail copy that no issued step carries yet
        self._next_serial = 0
        self._homes = layout.no_counts()  # admitted holdings by home lane
        self._num_home_moves = layout.no_counts()  # by the new home

    @property
    def num_tokens_total(self) -> int:
        """Tokens that fit into all lanes."""
        return (self.num_rows - 1) * self.layout.cp_size * self.layout.page_size

    def hint(self, key: RadixKey, namespace: str) -> int:
        """Valid tokens the tree has now for this key. Takes no lease and counts as no use: for ordering only."""
        check_key(key, self._tree.element_bytes)
        return self._tree.hint(key, namespace) if self.prefix_cache else 0

    def match(self, key: RadixKey, namespace: str, max_tokens: int) -> Holding:
        """Lease the longest cached prefix of at most max_tokens tokens, exact to the token. End it by admit + release, or by cancel."""
        check_key(key, self._tree.element_bytes)
        limit = max(max_tokens, 0) if self.prefix_cache else 0
        self._next_serial += 1
        holding = Holding(self._next_serial, self._tree.match(key[:limit], namespace), self.layout)
        self._holdings[holding.serial] = holding
        return holding

    def cancel(self, holding: Holding) -> None:
        """Give back a holding that was not admitted."""
        holding.expect(MATCHED)
        self._end(holding)

    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def admit(self, holding: Holding, num_tokens: int, lane_tokens: LaneCounts) -> Admission | Shortfall:
        """First growth: pages that cover `num_tokens` rows (the hit and the first chunk), and a slot; call has_free_slot() first.

        lane_tokens: int64 [cp_size] tokens that each lane already computes in this step (not changed). The part of a hit that is on the host gets
        device pages in the same lanes, and the order to load them. A hit that ends inside a page gets a private page in the lane of that page, and
        the order to copy. If only some lanes are short, the hit is cut to the page (fallback tail_copy_skipped), or to its device part
        (load_back_skipped): read num_cached_tokens of the answer; the row covers `num_tokens` rows all the same. After a Shortfall the holding
        stays matched: ask again or cancel.
        """
        holding.expect(MATCHED)
        if not self._free_slots:
            raise LedgerError(f"holding {holding.serial} is admitted, but all {self.num_slots} slots are taken")
        holding.moved_to_device(holding.lease.path_pages(holding.lease.root)[0])
        num_new = self.layout.num_pages(num_tokens) - holding.num_tree_pages
        if num_tokens < holding.num_cached_tokens or num_new <= holding.num_host_pages:
            raise LedgerError(f"admission of {num_tokens} tokens, but {holding.num_cached_tokens} are cached: nothing to compute")
        self._cut_to_what_fits(holding, num_new)
        fixed_lanes = self._fixed_lanes(holding)
        fixed = np.bincount(fixed_lanes, minlength=self.layout.cp_size)
        num_free = num_new - len(fixed_lanes)
        pages = self._supply.reserve(holding.serial, Demand(fixed, num_free), self._prefill_policy(holding, num_free, fixed, lane_tokens))
        if isinstance(pages, Shortfall):
            return pages
        given = np.empty_like(pages)
        given[np.argsort(fixed_lanes, kind="stable")] = pages[: len(fixed_lanes)]
        given[len(fixed_lanes) :] = pages[len(fixed_lanes) :]
        return self._admitted(holding, given)

    def _admitted(self, holding: Holding, pages: Pages) -> Admission:
        """pages: for the host part, the tail and the first chunk, in this order."""
        load, tail_copy, num_loaded = None, None, holding.num_host_pages
        if self._host is not None:
            self._host.hit(holding.lease, holding.num_cached_device, holding.num_cached_host)
            if num_loaded:
                load = self._host.load(holding.lease, pages[:num_loaded])
                holding.loaded(pages[:num_loaded])
        if holding.source is not None:
            source = holding.source
            tail_copy = TailCopyOrder(source.page, int(pages[num_loaded]), source.num_tokens, source.from_host)
            self._unissued.append(holding)
        holding.admitted(self._free_slots.pop(), pages[num_loaded:])
        self._homes[holding.home_lane] += 1
        return Admission(holding.slot, holding.pages.copy(), holding.num_cached_tokens, tail_copy, load)

    def extend(self, holding: Holding, num_tokens: int, *, decode: bool, lane_tokens: LaneCounts) -> Pages | Shortfall:
        """Pages to append so that the row covers `num_tokens` rows in all, int32 [n], n may be 0."""
        holding.expect(ADMITTED)
        num_new = self.layout.num_pages(num_tokens) - len(holding.pages)
        if num_new <= 0:
            return NO_PAGES
        fixed = self.layout.no_counts()
        home = holding.home_lane
        policy: Callable[[LaneCounts], Lanes]
        if decode:
            def policy(available: LaneCounts) -> Lanes:
                return decode_owner(home, num_new, self._other_homes(holding), available)
        else:
            policy = self._prefill_policy(holding, num_new, fixed, lane_tokens)
        pages = self._supply.reserve(holding.serial, Demand(fixed, num_new), policy)
        if not isinstance(pages, Shortfall):
            holding.grown(pages)
            self._homes[home] -= 1
            self._homes[holding.home_lane] += 1
            if decode and holding.home_lane != home:
                self._num_home_moves[holding.home_lane] += 1
        return pages

    def look_ahead(self, holding: Holding, num_tokens: int) -> None:
        """A request that decodes has `num_tokens` rows with this step and goes on growing. If the next step needs a page, it is promised one in its
        home lane, and one is evicted there if need be: evicted later, it would not be reusable yet, and the request would have to wait, or to move
        to whatever lane has a free page. Not done where a lane with fewer homes has one: moving there is better."""
        if num_tokens < len(holding.pages) * self.layout.page_size:
            return
        home, homes = holding.home_lane, self._other_homes(holding)
        self._supply.prepare(holding.serial, home, homes < homes[home])

    def publish(self, holding: Holding, key: RadixKey) -> RowChange | None:
        """Give the tree the whole pages of `key` = all tokens whose value and row are known. Where the tree had them already the row moves to
        the canonical pages (returned, for the next plan) and the duplicates are freed; None: the row is unchanged."""
        holding.expect(ADMITTED)
        check_key(key, self._tree.element_bytes)
        first, num_whole = holding.num_tree_pages, len(key) // self.layout.page_size
        if not self.prefix_cache or num_whole <= first:
            return None
        change = self._insert(holding, key[: num_whole * self.layout.page_size])
        return RowChange(first, change) if len(change) else None

    def release(self, holding: Holding, key: RadixKey) -> None:
        """The request has ended, and so has the last step that was issued with its slot. Its rows for `key` stay in the tree, the valid tail
        included; the rest, with an empty key everything private, is freed. Ends the leases and frees the slot."""
        holding.expect(ADMITTED)
        check_key(key, self._tree.element_bytes)
        was_issued = holding.source is None  # else not even the tail copy has been ordered: no private row is valid
        if self.prefix_cache and was_issued and len(key) > holding.num_tree_pages * self.layout.page_size:
            self._insert(holding, key)
        self._free_slots.append(holding.slot)
        self._homes[holding.home_lane] -= 1
        self._end(holding)

    def plan_backup(self, holding: Holding, key: RadixKey, num_rows: int) -> None:
        """An extend of the plan in the making computes rows of `key` up to `num_rows`: host pages are reserved for the private pages that are whole
        then, but for those that the tree has. Where the host has no room (fallback host_backup_skipped), the first ones go first."""
        holding.expect(ADMITTED)
        check_key(key, self._tree.element_bytes)
        if self._host is None or self._host.min_hits > 1 or not self.prefix_cache:
            return
        key = key[:num_rows]
        num_whole = min(len(key) // self.layout.page_size, len(holding.pages))
        if num_whole > holding.num_tree_pages:
            first = self._tree.probe(holding.lease, key) // self.layout.page_size
            self._host.reserve(holding.pages[first:num_whole], is_written=False)

    def take_backups(self) -> list[BackupOrder]:
        """All reservations since the last call, for the plan that is issued next: at most one order of rows that it computes and one of earlier
        rows. Call it just before drain_reusable_host()."""
        return self._host.take_backups() if self._host is not None else []

    def ticket_ended(self, ticket: int, lane: int) -> None:
        """A lane has done its part of a load or backup. The ticket ends when all lanes with pages of it have. Raises LedgerError for a ticket that
        is not open, and for a lane that has no part in it or has said so before."""
        if self._host is None:
            raise LedgerError(f"lane {lane} has ended ticket {ticket}, but there is no host tier")
        self._host.ticket_ended(ticket, lane)

    def has_open_tickets(self) -> bool:
        """Copies are under way, or ordered by an admission or take_backups()."""
        return self._host is not None and self._host.has_open_tickets()

    def oldest_open_ticket(self) -> int:
        """0: none is open."""
        return min(self._host.tickets(), default=0) if self._host is not None else 0

    def pending_load(self, holding: Holding) -> int:
        """The newest open load of a page of the row; 0: all of its pages are there."""
        return self._host.newest_load(holding.pages) if self._host is not None else 0

    def issued(self, step: int) -> None:
        """Step `step` is on its way: later frees wait for it. The sources of its tail copies lose their extra leases."""
        self._supply.issued(step)
        if self._host is not None:
            sources = [holding.source.page for holding in self._unissued if holding.source is not None and holding.source.from_host]
            self._host.residency.issued(step, np.array(sources, np.int32))
        for holding in self._unissued:
            self._end_source(holding)
        self._unissued.clear()

    def retired(self, step: int) -> None:
        """All ranks have returned the result of `step`."""
        self._supply.retired(step)
        if self._host is not None:
            self._host.residency.retired(step)

    def available(self) -> LaneCounts:
        """int64 [cp_size] free and evictable pages (not those that wait for a step)."""
        return self._allocator.free_counts() + self._tree.evictable_counts()

    def available_without(self, holdings: list[Holding]) -> LaneCounts:
        """What available() would be if these matched holdings were cancelled."""
        nodes = [holding.lease for holding in holdings] + [holding.source.node for holding in holdings if holding.source is not None]
        return self._allocator.free_counts() + self._tree.evictable_without(nodes)

    def free_counts(self) -> LaneCounts:
        return self._allocator.free_counts()

    def flush(self) -> None:
        """Empty the tree. Raises LedgerError while any request holds KV or a ticket is open."""
        if self._holdings:
            raise LedgerError(f"flush while {len(self._holdings)} requests hold KV: {sorted(self._holdings)[:8]}")
        if self.has_open_tickets():
            raise LedgerError("flush while copies are under way")
        pages, host_pages = self._tree.clear()
        self._supply.give(pages)
        if self._host is not None:
            self._host.residency.free(host_pages)

    def evictions(self) -> dict[str, object]:
        """Tokens (whole pages) that left the tree to make room since the start, and how long each eviction took."""
        return {"num_tokens": int(self._supply.num_evicted_pages.sum()) * self.layout.page_size, "times": self._supply.eviction_times.report()}

    def lane_totals(self) -> dict[str, list[int]]:
        """By lane: requests at home now; moves of a home to it, and pages of it that were evicted to make room, since the start."""
        return {
            "homes": self._homes.tolist(), "home_moves": self._num_home_moves.tolist(), "evicted_pages": self._supply.num_evicted_pages.tolist(),
        }

    def drain_reusable(self) -> Pages:
        """Pages that became reusable since the last call. Take them into every plan: a page may be in use again in the step after."""
        return self._allocator.drain_reusable()

    def drain_reusable_host(self) -> Pages:
        """The same of host pages."""
        return self._host.residency.allocator.drain_reusable() if self._host is not None else NO_PAGES

    def host_report(self) -> dict[str, object]:
        """What the host tier has done since the start; zeros without one. Tokens are those of whole pages; a copy counts when its ticket ends."""
        if self._host is not None:
            return self._host.report()
        dropped = dict.fromkeys(("no_room", "evicted_before_end", "host_evicted"), 0)
        names = ("backup_tokens", "load_tokens", "backup_duplicates", "open_tickets", "hits_device_tokens", "hits_host_tokens")
        return {**dict.fromkeys(names, 0), "dropped_tokens": dropped}

    def host_records(self, key: RadixKey, namespace: str) -> dict[bytes, int]:
        """The records of the whole pages of `key` by their content: name (see page_hashes) -> host page, READY ones only. For a tier below."""
        if self._host is None:
            return {}
        holding = self.match(key, namespace, len(key))
        found = self._host.records(holding.lease, page_hashes(key, namespace, self.layout))
        self.cancel(holding)
        return found

    def snapshot(self) -> dict[str, object]:
        """Counts for /server_info and metrics."""
        total = np.full(self.layout.cp_size, self.num_rows - 1, np.int64)
        free, tickets, cached = self._allocator.free_counts(), self._allocator.ticket_counts(), self._tree.cached_counts()
        host = dict.fromkeys(("total", "free", "cached", "held", "tickets"), self.layout.no_counts()) if self._host is None else self._host.counts()
        device = {"total": total, "free": free, "cached": cached, "held": total - free - tickets - cached, "tickets": tickets}
        return {
            "page_size": self.layout.page_size,
            "cp_size": self.layout.cp_size,
            "device": {name: counts.tolist() for name, counts in device.items()},
            "host": {name: counts.tolist() for name, counts in host.items()},
            "slots": {"total": self.num_slots, "free": len(self._free_slots)},
            "leases": sum(1 if holding.source is None else 2 for holding in self._holdings.values()) + len(self._tree.loads()),
            "requests": len(self._holdings),
        }

    def audit(self) -> None:
        """Raises LedgerError unless every page is in exactly one class and the tree, the leases, the slots and the homes are consistent."""
        audit_ledger(self._allocator, self._tree, list(self._holdings.values()), self._free_slots, self.num_slots, self._host)
        homes = [holding.home_lane for holding in self._holdings.values() if holding.state == ADMITTED]
        if (np.bincount(homes, minlength=self.layout.cp_size) != self._homes).any():
            raise LedgerError(f"homes are booked as {self._homes.tolist()}, the holdings have {sorted(homes)}")

    def _other_homes(self, holding: Holding) -> LaneCounts:
        """int64 [cp_size] admitted holdings at home in each lane, but for `holding`."""
        homes = self._homes.copy()
        if holding.state == ADMITTED:
            homes[holding.home_lane] -= 1
        return homes

    def _prefill_policy(self, holding: Holding, num_pages: int, fixed: LaneCounts, lane_tokens: LaneCounts) -> Callable[[LaneCounts], Lanes]:
        loads, homes = lane_tokens + fixed * self.layout.page_size, self._other_homes(holding)
        return lambda available: prefill_owners(num_pages, self.layout, loads, homes, available)

    def _fixed_lanes(self, holding: Holding) -> Lanes:
        """int32 [n] lanes of the device pages for the hit's host part, in path order, and of the page for its tail."""
        host_pages = holding.lease.path_pages(holding.lease.root)[1] if holding.num_host_pages else NO_PAGES
        tail = NO_PAGES if holding.source is None else np.array([holding.source.page], np.int32)
        return self.layout.lanes(np.concatenate((host_pages, tail)))

    def _cut_to_what_fits(self, holding: Holding, num_pages: int) -> None:
        """If the pages of the hit's own lanes cannot be had, but the same number in other lanes could: cut the hit. num_pages: all new ones."""
        fixed_lanes = self._fixed_lanes(holding)
        ended: list[Node] = []
        if holding.source is not None and not self._fits(fixed_lanes, num_pages, ended):
            ended = [holding.source.node]
            fixed_lanes = fixed_lanes[:-1]
            if self._fits(fixed_lanes, num_pages, ended):
                fallback.count("tail_copy_skipped")
                self._end_source(holding)
                holding.cut_to_page()
                return
        if holding.num_host_pages and not self._fits(fixed_lanes, num_pages, ended) and self._fits(fixed_lanes[:0], num_pages, ended):
            fallback.count("load_back_skipped")
            self._end_source(holding)
            old_lease, lease = holding.lease, self._tree.device_end(holding.lease)
            self._tree.pin(lease)
            holding.cut_to_device(lease)
            self._supply.give(self._tree.unpin(old_lease))

    def _fits(self, fixed_lanes: Lanes, num_pages: int, ended: list[Node]) -> bool:
        fixed = np.bincount(fixed_lanes, minlength=self.layout.cp_size)
        return self._supply.fits(Demand(fixed, num_pages - len(fixed_lanes)), ended)

    def _insert(self, holding: Holding, key: RadixKey) -> Pages:
        """Walk, move the row to canonical pages, then free duplicates. Returns the canonical pages that replaced the row's."""
        first = holding.num_tree_pages
        own = holding.private_pages
        if holding.source is not None:
            raise LedgerError(f"holding {holding.serial}: rows are published before the step with its tail copy is issued")
        if len(key) > len(holding.pages) * self.layout.page_size:
            raise LedgerError(f"holding {holding.serial}: {len(key)} rows are published, but its {len(holding.pages)} pages cannot have them")
        insertion = self._tree.insert(holding.lease, key, own)
        duplicates = own[: len(insertion.canonical)].copy()
        old_lease = holding.lease
        self._tree.pin(insertion.end)
        self._homes[holding.home_lane] -= 1  # the last page may be replaced too
        holding.published(insertion.end, insertion.canonical, first + len(insertion.canonical) + insertion.num_taken)
        self._homes[holding.home_lane] += 1
        left = self._supply.give(duplicates)
        self._supply.give(np.concatenate((insertion.dropped, self._tree.unpin(old_lease))))
        if self._host is not None:
            self._host.duplicated(left.num_ready + left.num_reserved + insertion.num_duplicates)
            if self._host.min_hits == 1:
                self._host.reserve(own[len(duplicates) : len(duplicates) + insertion.num_taken], is_written=True)
        return insertion.canonical

    def _end_source(self, holding: Holding) -> None:
        if holding.source is not None:
            node = holding.source.node
            holding.source_ended()
            self._supply.give(self._tree.unpin(node))

    def _end(self, holding: Holding) -> None:
        """Private pages, leases and promises of a holding end."""
        self._supply.give(holding.private_pages)
        self._end_source(holding)
        if holding in self._unissued:
            self._unissued.remove(holding)
        lease = holding.lease
        holding.ended()
        self._supply.give(self._tree.unpin(lease))
        self._supply.forget(holding.serial)
        del self._holdings[holding.serial]
