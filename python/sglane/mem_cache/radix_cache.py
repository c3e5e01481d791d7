"""The radix tree with valid tails: which tokens have KV rows, in which pages, and who may not lose them.

Nodes own whole pages and are split at page boundaries only; only a leaf may end inside a page. A match is token-exact: whole pages, and then
perhaps the first tokens of one more page (of a tail, or of a full page that diverges), which the ledger copies into a private page.
"""
import heapq
from bisect import bisect_left
from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from sglane.mem_cache.evict_policy import plan_eviction
from sglane.mem_cache.page_layout import NO_PAGES, LaneCounts, PageLayout, Pages
from sglane.mem_cache.radix_key import RadixKey, key_view
from sglane.mem_cache.radix_node import Node

#: A leaf grows in place up to this many tokens; a longer one is continued by a child, so that growing and splitting stay cheap.
MAX_GROWN_TOKENS = 16384


class TailSource(NamedTuple):
    """The page whose first tokens continue a hit beyond its whole pages."""

    node: Node
    page: int
    num_tokens: int  # 0 < num_tokens < page_size


class Match(NamedTuple):
    """A hit. All of its pages are on the device; a host part would follow them. Leases on `node` and on the source's node are taken."""

    node: Node  # the whole pages end here
    pages: Pages  # int32, whole pages
    source: TailSource | None
    num_tokens: int


class Insertion(NamedTuple):
    canonical: Pages  # pages the tree had already: they replace the first ones offered
    num_taken: int  # pages after those, which now belong to the tree
    end: Node  # the inserted whole pages end here (or above, if the key ended inside a page)
    dropped: Pages  # pages that left the tree: superseded tails


class _Walk(NamedTuple):
    node: Node  # matched completely, ends at a page boundary
    inside: Node | None  # the child in which the walk ended
    num_bytes_inside: int

    @property
    def num_bytes(self) -> int:
        """Of the query, matched from the root on."""
        return self.node.end + self.num_bytes_inside


class RadixCache:
    """The one writer of tree shape, leases and the logical clock.

    element_bytes: TOKEN_BYTES or BIGRAM_BYTES of radix_key; a key of another type raises ValueError.
    """

    def __init__(self, layout: PageLayout, element_bytes: int) -> None:
        self.layout = layout
        self.element_bytes = element_bytes
        self._page_bytes = layout.page_size * element_bytes
        self._roots: dict[str, Node] = {}
        self._namespaces: dict[int, str] = {}  # root id -> its namespace
        self._next_id = 0
        self._clock = 0
        self._cached = layout.no_counts()
        self._evictable = layout.no_counts()
        self._leaves: dict[int, Node] = {}  # exactly the unpinned leaves
        self._queue: list[tuple[int, int, Node]] = []  # heap of (last_used, id, node); stale entries are dropped when met

    def cached_counts(self) -> LaneCounts:
        """Pages of the tree, by lane."""
        return self._cached.copy()

    def evictable_counts(self) -> LaneCounts:
        """Pages that eviction can win, by lane: those of nodes without a lease on or below them."""
        return self._evictable.copy()

    def hint(self, key: RadixKey, namespace: str) -> int:
        """Tokens a match would find now. Changes nothing (but which children are tried first)."""
        query = key_view(key, self.element_bytes)
        root = self._roots.get(namespace)
        if root is None:
            return 0
        walk = self._walk(root, query)
        return walk.num_bytes // self.element_bytes

    def match(self, key: RadixKey, namespace: str) -> Match:
        """The longest prefix of `key` with KV rows, leased at once."""
        query = key_view(key, self.element_bytes)
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._new_node(None, b"", NO_PAGES, self.layout.no_counts())
            self._namespaces[root.id] = namespace
        walk = self._walk(root, query)
        num_bytes = walk.num_bytes
        node, source = self._cut_inside(walk), None
        self._clock += 1
        if walk.num_bytes_inside % self._page_bytes:
            assert walk.inside is not None
            num_tokens = walk.num_bytes_inside % self._page_bytes // self.element_bytes
            source = TailSource(walk.inside, int(walk.inside.pages[0]), num_tokens)
            source.node.touch(self._clock)
            self.pin(source.node)
        top, pages = node.lease_path(self._clock)
        self._settle(node, None, top.path_lanes - node.path_lanes)
        return Match(node, pages, source, num_bytes // self.element_bytes)

    def insert(self, start: Node, key: RadixKey, pages: Pages) -> Insertion:
        """Continue the leased node `start` to the end of `key`. `key` is a whole key that begins with the path to `start`; `pages` has the rows
        after that. Pages that the tree takes belong to it from now on.

        A key that ends inside a page leaves a valid tail, unless the tree has those tokens already.
        """
        query = key_view(key, self.element_bytes)
        walk = self._walk(start, query)
        num_found = walk.num_bytes
        end = self._cut_inside(walk)
        num_whole = num_found - num_found % self._page_bytes
        canonical = end.pages_below(start)
        dropped, num_taken = NO_PAGES, 0
        if num_found < len(query):
            dropped = self._drop_superseded_by(end, query[num_whole : num_whole + self._page_bytes])
            offered = pages[len(canonical) : -(-(len(query) - start.end) // self._page_bytes)]
            num_taken = len(offered)
            end = self._attach(end, bytes(query[num_whole:]), offered, own_leases=1 if end is start else 0)
        self._clock += 1
        end.touch(self._clock)
        self._settle(end, None, None)
        return Insertion(canonical, num_taken, end, dropped)

    def pin(self, node: Node) -> None:
        """Take a lease that ends at `node`."""
        top = node.pin()
        self._settle(node, None, top.path_lanes - node.path_lanes)

    def unpin(self, node: Node) -> Pages:
        """End a lease. Returns pages that leave the tree: a tail that was superseded while it was leased."""
        top = node.unpin()
        self._settle(node, None, node.path_lanes - top.path_lanes)
        parent = node.parent
        if parent is None or node.is_pinned or len(node.key) >= self._page_bytes:
            return NO_PAGES
        index = bisect_left(parent.heads, node.key)
        if index + 1 < len(parent.heads) and parent.heads[index + 1].startswith(node.key):
            return self._remove(node)
        return NO_PAGES

    def evictable_after_unpin(self, node: Node) -> LaneCounts:
        """What evictable_counts() would be if one lease of `node` ended."""
        top: Node = node
        while top.pins == 1 and top.parent is not None:
            top = top.parent
        return self._evictable + (node.path_lanes - top.path_lanes)

    def evict(self, deficit: LaneCounts) -> Pages | None:
        """Drop the least recently used page suffixes that cover `deficit`; returns all pages that left the tree. None (and nothing is
        changed) if the deficit cannot be covered."""
        with closing(self._oldest_leaves()) as oldest:
            victims = plan_eviction(oldest, deficit, self.layout)
        if victims is None:
            return None
        parts = []
        for victim in victims:
            if victim.num_pages == len(victim.node.pages):
                parts.append(self._remove(victim.node))
            else:
                parts.append(self._drop_suffix(victim.node, victim.num_pages))
        return np.concatenate(parts) if parts else NO_PAGES

    def clear(self) -> Pages:
        """Drop everything; only without leases."""
        assert not any(root.pins for root in self._roots.values()), "the tree is cleared while leases are held"
        pages = self.evict(self._cached)
        assert pages is not None and not self._cached.any()
        return pages

    def roots(self) -> dict[str, Node]:
        """Namespace -> root (for audits)."""
        return self._roots

    def leaves(self) -> dict[int, Node]:
        """Node id -> unpinned leaf (for audits)."""
        return self._leaves

    def _walk(self, node: Node, query: memoryview) -> _Walk:
        """Follow `query` (bytes of a whole key, known to match down to the end of `node`) further. One slice and one memcmp for each node whose
        child that was met last is met again."""
        end, page_bytes = len(query), self._page_bytes
        while node.end < end:
            while node.end < end and (child := node.recent) is not None and child.key.startswith(query[child.span]):
                node = child
            if node.end > end or len(node.key) % page_bytes:  # the last child is longer than the rest of the query, or a tail
                parent, num_bytes = node.parent, len(node.key)
                assert parent is not None
                if node.end >= end or num_bytes > page_bytes:
                    return _Walk(parent, node, min(num_bytes, end - parent.end))
                node = parent  # another child may begin with this tail and go on
            if node.end == end or not node.children:
                break
            child, common = node.best_child(query[node.end :], page_bytes)
            if common < len(child.key) or common % page_bytes:
                common -= common % self.element_bytes
                return _Walk(node, child if common else None, common)
            node.meet(child)
            node = child
        return _Walk(node, None, 0)

    def _cut_inside(self, walk: _Walk) -> Node:
        """The node where the walk's whole pages end; splits the node in which the walk ended if they end there."""
        num_pages = walk.num_bytes_inside // self._page_bytes
        if walk.inside is None or num_pages == 0:
            return walk.node
        node = walk.inside
        pages = node.pages[:num_pages]
        path_lanes = walk.node.path_lanes + self.layout.lane_counts(pages)
        upper = self._new_node(None, node.key[: num_pages * self._page_bytes], pages, path_lanes)
        node.split_upper(upper, self._page_bytes)
        self._settle(node, None, None)
        return upper

    def _attach(self, parent: Node, key: bytes, pages: Pages, own_leases: int) -> Node:
        """New pages at the end of `parent`: it grows in place if nobody else's lease ends there, else it gets a child."""
        lanes = self.layout.lane_counts(pages)
        grown = len(parent.key) + len(key)
        if parent.parent is not None and not parent.children and parent.leases == own_leases and grown <= MAX_GROWN_TOKENS * self.element_bytes:
            parent.append(key, pages, lanes)
            self._settle(parent, lanes, None if parent.is_pinned else lanes)
            return parent
        child = self._new_node(parent, key, pages, parent.path_lanes + lanes)
        parent.add_child(child, self._page_bytes)
        self._settle(child, lanes, lanes)
        return child

    def _drop_superseded_by(self, parent: Node, head: memoryview) -> Pages:
        """Drop the unpinned tail below `parent` that is a prefix of `head`. There is at most one, and it is the left neighbour of head's place:
        whatever lies between them begins with the tail too, and would have superseded it."""
        if not parent.children:
            return NO_PAGES
        tail, common = parent.best_child(head, self._page_bytes)
        if tail.is_pinned or common < len(tail.key):
            return NO_PAGES
        return self._remove(tail)

    def _remove(self, node: Node) -> Pages:
        """An unpinned leaf leaves the tree."""
        parent = node.parent
        assert parent is not None and not node.children and not node.is_pinned, f"node {node.id} cannot be removed"
        lanes = self.layout.lane_counts(node.pages)
        parent.remove_child(node, self._page_bytes)
        self._settle(node, -lanes, -lanes)
        self._settle(parent, None, None)
        return node.pages

    def _drop_suffix(self, node: Node, num_pages: int) -> Pages:
        pages = node.pages[len(node.pages) - num_pages :]
        lanes = self.layout.lane_counts(pages)
        node.drop_suffix(num_pages, self._page_bytes, lanes)
        self._settle(node, -lanes, -lanes)
        return pages

    def _new_node(self, parent: Node | None, key: bytes, pages: Pages, path_lanes: LaneCounts) -> Node:
        self._next_id += 1
        return Node(self._next_id, parent, key, pages, path_lanes)

    def _settle(self, node: Node, cached_delta: LaneCounts | None, evictable_delta: LaneCounts | None) -> None:
        """The only place where sizes, the leaf set and the set of roots change. Called after every change, with the node whose pages, leases
        or children changed and the pages that the change added to (or took from) the tree and the evictable part of it."""
        if cached_delta is not None:
            self._cached += cached_delta
        if evictable_delta is not None:
            self._evictable += evictable_delta
        self._settle_leaf(node)
        if node.parent is not None:
            self._settle_leaf(node.parent)

    def _settle_leaf(self, node: Node) -> None:
        if node.is_pinned or node.children:
            self._leaves.pop(node.id, None)
            if node.id in self._namespaces and not node.children and not node.pins:
                del self._roots[self._namespaces.pop(node.id)]
            return
        self._leaves[node.id] = node
        if node.queued != node.last_used:
            node.mark_queued(node.last_used)
            heapq.heappush(self._queue, (node.last_used, node.id, node))
            if len(self._queue) > 2 * len(self._leaves) + 1024:
                self._rebuild_queue()

    def _oldest_leaves(self) -> Generator[Node, None, None]:
        """Unpinned leaves by (last_used, id). The tree must not change before the iterator is closed."""
        met = []
        try:
            while self._queue:
                entry = heapq.heappop(self._queue)
                last_used, _, node = entry
                if node.queued != last_used:
                    continue  # the node has a newer entry
                if node.id not in self._leaves:
                    node.mark_queued(-1)
                    continue
                met.append(entry)
                yield node
        finally:
            for entry in met:
                heapq.heappush(self._queue, entry)

    def _rebuild_queue(self) -> None:
        """Drop the stale entries."""
        for _, _, node in self._queue:
            node.mark_queued(-1)
        for node in self._leaves.values():
            node.mark_queued(node.last_used)
        self._queue = [(node.last_used, node.id, node) for node in self._leaves.values()]
        heapq.heapify(self._queue)
