"""The audit of the host tier: host pages in one class each, and residency, tickets and the host side of the tree recomputed from scratch."""
from collections.abc import Sequence

import numpy as np

from sglane.mem_cache.hiradix_cache import NONE, RESERVED
from sglane.mem_cache.holding import BackupOrder, Holding, LoadOrder
from sglane.mem_cache.host_tier import HostTier
from sglane.mem_cache.lane_allocator import LaneAllocator
from sglane.mem_cache.leaf_queue import LeafQueue
from sglane.mem_cache.page_layout import NO_PAGES, LedgerError, Pages
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_node import Node


def audit_host(host: HostTier, tree: RadixCache, nodes: list[Node], allocator: LaneAllocator, holdings: Sequence[Holding]) -> None:
    """Raises LedgerError that names the pages or nodes that do not add up. allocator: of device pages."""
    cached = np.concatenate([NO_PAGES, *(node.pages for node in nodes)])
    held = np.concatenate([NO_PAGES, *(holding.private_pages for holding in holdings)])
    _audit_residency(host, cached, held)
    _audit_tickets(host, tree, allocator, np.concatenate((cached, held)))
    _audit_classes(host, cached, held, np.concatenate([NO_PAGES, *(node.host_pages for node in nodes)]))
    _audit_nodes(host, tree, nodes)


def audit_leaves(queue: LeafQueue, expected: set[int], name: str) -> None:
    if expected != set(queue.leaves):
        raise LedgerError(f"{name} are {sorted(expected)}, the leaf set has {sorted(queue.leaves)}")
    if queue.unqueued():
        raise LedgerError(f"{name} {queue.unqueued()} are not in the eviction queue")


def _expect(wrong: Pages, host: HostTier, what: str) -> None:
    if len(wrong):
        raise LedgerError(f"pages {host.layout.describe(wrong)}: {what}")


def _audit_residency(host: HostTier, cached: Pages, held: Pages) -> None:
    residency = host.residency
    every = np.arange(residency.num_pages, dtype=np.int32)
    state, copy, ticket = residency.state, residency.copy, residency.ticket
    _expect(every[(state == NONE) != (copy == 0)], host, "a host page without a state, or a state without one")
    _expect(every[(state == RESERVED) & (ticket == 0)], host, "reserved, but no ticket has the copy")
    _expect(every[(state != RESERVED) & (ticket < 0)], host, "untaken, but not reserved")
    copied = (state == RESERVED) | (residency.loading > 0)
    _expect(every[copied & (copy % host.layout.cp_size != every % host.layout.cp_size)], host, "a copy between lanes")
    _expect(np.setdiff1d(every[state != NONE], np.concatenate((cached, held))), host, "a copy of a page that nobody has")
    _expect(np.setdiff1d(every[residency.loading > 0], cached[residency.is_ready(cached)]), host, "loading, but not a page of the tree with a twin")


def _audit_tickets(host: HostTier, tree: RadixCache, allocator: LaneAllocator, in_use: Pages) -> None:
    residency = host.residency
    backups: dict[int, int] = {}
    loads: dict[int, int] = {}
    for number, ticket in host.tickets().items():
        lanes = set(host.layout.lanes(ticket.order.device_pages).tolist())
        if not ticket.waiting or not ticket.waiting <= lanes or ticket.order.ticket != number:
            raise LedgerError(f"ticket {number} waits for lanes {sorted(ticket.waiting)}, its pages are in {sorted(lanes)}")
        (loads if isinstance(ticket.order, LoadOrder) else backups).update(dict.fromkeys(ticket.order.device_pages.tolist(), number))
    for name, booked, expected in (("backup", residency.ticket, backups), ("load", residency.loading, loads)):
        found = {page: int(booked[page]) for page in np.flatnonzero(booked > 0).tolist()}
        if found != expected:
            raise LedgerError(f"{name} tickets by page are {found}, the open ones have {expected}")
    if sorted(tree.loads()) != sorted(set(loads.values())):
        raise LedgerError(f"the tree has leases of loads {sorted(tree.loads())}, open are {sorted(set(loads.values()))}")
    copied = np.array(list(backups), np.int32)
    gone = copied[~np.isin(copied, in_use)]
    _expect(gone[~allocator.is_parked(gone)], host, "given back while a backup is under way, but not parked")
    every = np.arange(residency.num_pages, dtype=np.int32)
    _expect(np.setdiff1d(every[allocator.is_parked(every)], copied), host, "parked, but no backup is under way")


def _audit_classes(host: HostTier, cached: Pages, held: Pages, host_only: Pages) -> None:
    """By lane and page: free + cached + held + tickets are all host pages, each once."""
    residency = host.residency
    residency.allocator.audit()
    orders = [ticket.order.host_pages for ticket in host.tickets().values() if isinstance(ticket.order, BackupOrder)]
    untaken = np.flatnonzero((residency.state == RESERVED) & (residency.ticket < 0))
    twins = {name: residency.copy[pages[residency.is_ready(pages)]] for name, pages in (("cached", cached), ("held", held))}
    classes = {
        "free": residency.allocator.free_pages(),
        "cached": np.concatenate((host_only, twins["cached"])),
        "held": twins["held"],
        "tickets": np.concatenate([residency.allocator.ticket_pages(), residency.copy[untaken], *orders]),
    }
    pages, counts = np.unique(np.concatenate(list(classes.values())), return_counts=True)
    every = np.arange(host.layout.cp_size, residency.allocator.num_rows * host.layout.cp_size, dtype=np.int32)
    _expect(pages[counts > 1], host, "host pages in more than one class")
    _expect(np.setxor1d(pages, every), host, "host pages in no class, or that do not exist")
    for name, booked in host.counts().items():
        expected = host.layout.lane_counts(every if name == "total" else classes[name])
        if (booked != expected).any():
            raise LedgerError(f"{name} host pages by lane are counted as {booked.tolist()}, there are {expected.tolist()}")


def _audit_nodes(host: HostTier, tree: RadixCache, nodes: list[Node]) -> None:
    owners, leaves = np.zeros_like(tree.owners()), set()
    hosted: dict[int, bool] = {}
    for node in reversed(nodes):  # children first
        owners[node.pages] = node.id
        num_hosted = int(host.residency.is_ready(node.pages).sum()) + len(node.host_pages)
        num_children = sum(hosted[child.id] for child in node.children)
        hosted[node.id] = num_hosted > 0 or num_children > 0
        if (node.num_hosted, node.num_hosted_children) != (num_hosted, num_children):
            raise LedgerError(f"node {node.id} has {num_hosted} pages on the host and {num_children} children with such, booked are "
                              f"{node.num_hosted} and {node.num_hosted_children}")
        if num_hosted and not num_children:
            leaves.add(node.id)
    wrong = np.flatnonzero(owners != tree.owners()).astype(np.int32)
    _expect(wrong, host, f"owned by nodes {owners[wrong[:8]].tolist()}, booked are {tree.owners()[wrong[:8]].tolist()}")
    audit_leaves(tree.host_leaves(), leaves, "host leaves")
    if set(tree.node_ids()) != {node.id for node in nodes}:
        raise LedgerError(f"nodes are {sorted(hosted)}, booked are {sorted(tree.node_ids())}")
