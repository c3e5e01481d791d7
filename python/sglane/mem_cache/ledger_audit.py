"""The exact audit: every page in one class by set comparison, and the tree's invariants recomputed from scratch."""
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from sglane.mem_cache.holding import ADMITTED, MATCHED, Holding
from sglane.mem_cache.host_audit import audit_host, audit_leaves
from sglane.mem_cache.host_tier import HostTier
from sglane.mem_cache.lane_allocator import LaneAllocator
from sglane.mem_cache.page_layout import NO_PAGES, LedgerError, PageLayout, Pages
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_node import Node


def audit_ledger(
    allocator: LaneAllocator, tree: RadixCache, holdings: Sequence[Holding], free_slots: Sequence[int], num_slots: int, host: HostTier | None
) -> None:
    """Raises LedgerError that names the pages, nodes or slots that do not add up."""
    allocator.audit()
    nodes = list(_nodes(tree))
    _audit_pages(allocator, {
        "cached": np.concatenate([NO_PAGES, *(node.pages for node in nodes)]),
        "held": np.concatenate([NO_PAGES, *(holding.private_pages for holding in holdings)]),
    })
    root_ids = {root.id for root in tree.roots().values()}
    for node in nodes:
        _audit_node(node, tree, is_root=node.id in root_ids)
    _audit_sizes(tree, nodes)
    _audit_leases(nodes, holdings, tree)
    if host is not None:
        audit_host(host, tree, nodes, allocator, holdings)
    _audit_rows(tree.layout, holdings)
    slots = sorted([*free_slots, *(holding.slot for holding in holdings if holding.state == ADMITTED)])
    if slots != list(range(num_slots)):
        raise LedgerError(f"slots free or taken are {slots}, of {num_slots}")


def _nodes(tree: RadixCache) -> Iterator[Node]:
    """All nodes, parents first."""
    stack = list(tree.roots().values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children)


def _audit_pages(allocator: LaneAllocator, in_use: dict[str, Pages]) -> None:
    """Each page is in exactly one class."""
    layout = allocator.layout
    classes = {"free": allocator.free_pages(), "tickets": allocator.ticket_pages(), **in_use}
    listed = np.concatenate(list(classes.values()))
    pages, counts = np.unique(listed, return_counts=True)
    twice = pages[counts > 1]
    if len(twice):
        where = [name for name, members in classes.items() if np.isin(twice, members).any()]
        raise LedgerError(f"pages {layout.describe(twice)} are listed more than once, in {', '.join(where)}")
    every = np.arange(layout.cp_size, allocator.num_rows * layout.cp_size, dtype=np.int32)
    lost, foreign = np.setdiff1d(every, pages), np.setdiff1d(pages, every)
    if len(lost) or len(foreign):
        raise LedgerError(f"pages in no class: {layout.describe(lost) or 'none'}; pages that do not exist: {layout.describe(foreign) or 'none'}")


def _audit_node(node: Node, tree: RadixCache, is_root: bool) -> None:
    layout = tree.layout
    page_bytes = layout.page_size * tree.element_bytes
    is_tail = len(node.key) % page_bytes != 0
    parent_path = layout.no_counts() if node.parent is None else node.parent.device_lanes
    start = 0 if node.parent is None else node.parent.end
    checks = {
        "its children are sorted and start differently": all(a < b for a, b in zip(node.heads, node.heads[1:])),
        "its heads are its children's first pages": node.heads == [child.key[:page_bytes] for child in node.children],
        "its children know it": all(child.parent is node for child in node.children),
        "the child met last is one of them": node.recent is None or node.recent in node.children,
        "an inner node has whole pages": not (is_tail and node.children),
        "its end and span are those of its key": (node.end, node.span) == (start + len(node.key), slice(start, node.end)),
        "its key has whole elements": len(node.key) % tree.element_bytes == 0,
        "its pages cover its key": node.num_pages == -(-len(node.key) // page_bytes),
        "all above a page on the device is there too": not node.page_ids or node.parent is None or not node.parent.host_ids,
        "its children on the device are counted": node.num_device_children == sum(bool(child.page_ids) for child in node.children),
        "only roots are empty": (node.parent is None) == (not node.key) == is_root,
        "its path counts add up": np.array_equal(node.device_lanes, parent_path + layout.lane_counts(node.pages)),
        "its pins are its leases and pinned children": node.pins == node.leases + sum(child.pins > 0 for child in node.children),
        "it was used when its children were": all(child.last_used <= node.last_used for child in node.children),
        "an unused root is forgotten": node.parent is not None or bool(node.children) or node.pins > 0,
    }
    for name, holds in checks.items():
        if not holds:
            raise LedgerError(f"node {node.id} (pages {layout.describe(node.pages)}): not true that {name}")
    for tail, fuller in zip(node.heads, node.heads[1:]):
        child = node.children[node.heads.index(tail)]
        if fuller.startswith(tail) and child.pins == 0:
            raise LedgerError(f"node {child.id}: a superseded tail without a lease stayed (pages {layout.describe(child.pages)})")


def _audit_sizes(tree: RadixCache, nodes: list[Node]) -> None:
    cached, evictable = tree.layout.no_counts(), tree.layout.no_counts()
    leaves = set()
    for node in nodes:
        lanes = tree.layout.lane_counts(node.pages)
        cached += lanes
        if node.pins == 0 and node.parent is not None:
            evictable += lanes
            if node.page_ids and not any(child.page_ids for child in node.children):
                leaves.add(node.id)
    audit_leaves(tree.leaves(), leaves, "unpinned leaves")
    for name, booked, counted in (("cached", tree.cached_counts(), cached), ("evictable", tree.evictable_counts(), evictable)):
        if (booked != counted).any():
            raise LedgerError(f"{name} pages by lane are booked as {booked.tolist()}, the tree has {counted.tolist()}")


def _audit_leases(nodes: list[Node], holdings: Sequence[Holding], tree: RadixCache) -> None:
    expected = Counter(node.id for node in tree.loads().values())
    for holding in holdings:
        expected[holding.lease.id] += 1
        if holding.source is not None:
            expected[holding.source.node.id] += 1
    actual = Counter({node.id: node.leases for node in nodes if node.leases})
    if expected != actual:
        raise LedgerError(f"leases by node are {dict(actual)}, the holdings and loads have {dict(expected)}")


def _audit_rows(layout: PageLayout, holdings: Sequence[Holding]) -> None:
    for holding in holdings:
        holding.expect(MATCHED, ADMITTED)
        canonical, host_only = holding.lease.path_pages(holding.lease.root)
        if holding.state == MATCHED:  # others may have loaded some of its host part
            canonical, loaded = canonical[: holding.num_tree_pages], canonical[holding.num_tree_pages :]
            if len(loaded) + len(host_only) != holding.num_host_pages:
                raise LedgerError(f"holding {holding.serial}: its path has {len(loaded)} loaded and {len(host_only)} host-only pages, "
                                  f"it has {holding.num_host_pages}")
        elif len(host_only):
            raise LedgerError(f"holding {holding.serial} is admitted, but host pages {layout.describe(host_only)} of its path are not loaded")
        if not np.array_equal(holding.pages[: holding.num_tree_pages], canonical):
            raise LedgerError(f"holding {holding.serial} (slot {holding.slot}): its row has {layout.describe(holding.pages)}, "
                              f"the leased path {layout.describe(canonical)}")
