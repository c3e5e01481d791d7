"""Reservations, tickets and numbers of the host tier: it joins the tree and residency for the ledger.

A ticket is one copy order of a plan. It ends when each lane that has pages of it has said so; only then a copy becomes visible, or a loaded page
counts as present.
"""
from dataclasses import dataclass

import numpy as np

from sglane.mem_cache.hiradix_cache import READY, RESERVED, UNTAKEN_WRITING, UNTAKEN_WRITTEN, Residency
from sglane.mem_cache.holding import BackupOrder, LoadOrder
from sglane.mem_cache.page_layout import NO_PAGES, LaneCounts, LedgerError, PageLayout, Pages
from sglane.mem_cache.page_supply import PageSupply
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_node import Node
from sglane.utils import fallback


@dataclass
class Ticket:
    """An open one. waiting: lanes that have not said that their part is done."""

    order: LoadOrder | BackupOrder
    waiting: set[int]


class HostTier:
    """min_hits: as HostOptions. Its verbs are the ledger's; the ledger's docstrings say what they promise."""

    def __init__(self, layout: PageLayout, min_hits: int, residency: Residency, tree: RadixCache, supply: PageSupply) -> None:
        self.layout = layout
        self.min_hits = min_hits
        self.residency = residency
        self._tree = tree
        self._supply = supply
        self._tickets: dict[int, Ticket] = {}
        self._last_ticket = 0
        self._untaken: list[Pages] = []  # device pages with a reservation, some of them given up since
        self._num_backup_pages = self._num_load_pages = self._num_duplicates = 0
        self._num_no_room = self._num_host_evicted = 0
        self._hit_tokens = {"device": 0, "host": 0}

    def reserve(self, pages: Pages, *, is_written: bool) -> None:
        """Host pages for those device pages that have no copy and no reservation, as far as there is room after eviction."""
        wanted = pages[self.residency.lacking(pages)]
        if not len(wanted):
            return
        lanes = self.layout.lanes(wanted)
        counts = np.bincount(lanes, minlength=self.layout.cp_size)
        deficit = np.maximum(counts - self.residency.free_counts(), 0)
        if deficit.any():
            self._num_host_evicted += self._tree.evict_host(deficit)
            fits = _first_of_each_lane(lanes, self.residency.free_counts())
            if not fits.all():
                self._num_no_room += int((~fits).sum())
                fallback.count("host_backup_skipped")
                wanted, lanes = wanted[fits], lanes[fits]
        hosts = self.residency.allocator.alloc(lanes)
        assert isinstance(hosts, np.ndarray), f"host pages that are free were refused: {hosts}"
        self.residency.reserve(wanted, hosts, is_written)
        self._untaken.append(wanted)

    def hit(self, node: Node, num_device_tokens: int, num_host_tokens: int) -> None:
        """An admitted request has found the path to `node`."""
        self._hit_tokens["device"] += num_device_tokens
        self._hit_tokens["host"] += num_host_tokens
        self.reserve(self._tree.pages_of_hits(node, self.min_hits), is_written=True)

    def load(self, node: Node, pages: Pages) -> LoadOrder:
        self._last_ticket += 1
        order = LoadOrder(self._last_ticket, self._tree.load(node, pages, self._last_ticket), pages)
        self._open(order)
        return order

    def take_backups(self) -> list[BackupOrder]:
        pages = np.unique(np.concatenate([NO_PAGES, *self._untaken]))
        self._untaken.clear()
        orders = []
        for code in (UNTAKEN_WRITING, UNTAKEN_WRITTEN):
            mine = pages[self.residency.ticket[pages] == code]
            if len(mine):
                self._last_ticket += 1
                self.residency.open(mine, self._last_ticket)
                orders.append(BackupOrder(self._last_ticket, mine, self.residency.copy[mine], code == UNTAKEN_WRITTEN))
                self._open(orders[-1])
        return orders

    def ticket_ended(self, ticket: int, lane: int) -> None:
        found = self._tickets.get(ticket)
        if found is None or lane not in found.waiting:
            waiting = "is not open" if found is None else f"waits for lanes {sorted(found.waiting)}"
            raise LedgerError(f"lane {lane} says that its part of ticket {ticket} has ended, but it {waiting} (last ticket {self._last_ticket})")
        found.waiting.remove(lane)
        if found.waiting:
            return
        del self._tickets[ticket]
        pages = found.order.device_pages
        if isinstance(found.order, LoadOrder):
            self.residency.end_load(pages, ticket)
            self._num_load_pages += len(pages)
            self._supply.give(self._tree.load_ended(ticket))
            return
        kept = self.residency.commit(pages, found.order.host_pages, ticket)
        self._num_backup_pages += int(kept.sum())
        self._tree.copies_committed(pages[kept])
        self._supply.backup_ended(pages)

    def has_open_tickets(self) -> bool:
        return bool(self._tickets)

    def newest_load(self, pages: Pages) -> int:
        """Of the open loads of these device pages; 0: none."""
        if not self._tree.loads() or not len(pages):
            return 0
        return int(self.residency.loading[pages].max())

    def duplicated(self, num_pages: int) -> None:
        """The tree had these pages, with copies of their own."""
        self._num_duplicates += num_pages

    def tickets(self) -> dict[int, Ticket]:
        """The open ones by number."""
        return self._tickets

    def records(self, node: Node, hashes: list[bytes]) -> dict[bytes, int]:
        """hashes: names of the whole pages of the path to `node`, and perhaps more. Returns the host pages of those that have one."""
        device_pages, host_pages = node.path_pages(node.root)
        twins = np.where(self.residency.is_ready(device_pages), self.residency.copy[device_pages], 0)
        return {name: page for name, page in zip(hashes, [*twins.tolist(), *host_pages.tolist()]) if page}

    def report(self) -> dict[str, object]:
        size = self.layout.page_size
        dropped = {
            "no_room": self._num_no_room, "evicted_before_end": self._supply.num_backups_dropped,
            "host_evicted": self._num_host_evicted + self._supply.num_host_pages_dropped,
        }
        return {
            "backup_tokens": self._num_backup_pages * size,
            "load_tokens": self._num_load_pages * size,
            "backup_duplicates": self._num_duplicates,
            "open_tickets": len(self._tickets),
            "dropped_tokens": {reason: num_pages * size for reason, num_pages in dropped.items()},
            "hits_device_tokens": self._hit_tokens["device"],
            "hits_host_tokens": self._hit_tokens["host"],
        }

    def counts(self) -> dict[str, LaneCounts]:
        """Host pages by lane and class, int64 [cp_size] each."""
        allocator, residency = self.residency.allocator, self.residency
        total = np.full(self.layout.cp_size, allocator.num_rows - 1, np.int64)
        free = allocator.free_counts()
        ready = np.flatnonzero(residency.state == READY).astype(np.int32)
        held = self.layout.lane_counts(ready[self._tree.owners()[ready] == 0])
        untaken = np.flatnonzero((residency.state == RESERVED) & (residency.ticket < 0)).astype(np.int32)
        tickets = allocator.ticket_counts() + self.layout.lane_counts(untaken)
        for ticket in self._tickets.values():
            if isinstance(ticket.order, BackupOrder):
                tickets += self.layout.lane_counts(ticket.order.host_pages)
        return {"total": total, "free": free, "cached": total - free - held - tickets, "held": held, "tickets": tickets}

    def _open(self, order: LoadOrder | BackupOrder) -> None:
        self._tickets[order.ticket] = Ticket(order, set(self.layout.lanes(order.device_pages).tolist()))


def _first_of_each_lane(lanes: Pages, room: LaneCounts) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """bool [n]: the first room[lane] entries of each lane."""
    first = np.zeros(len(lanes), np.bool_)
    for lane, count in enumerate(room.tolist()):
        first[np.flatnonzero(lanes == lane)[:count]] = True
    return first
