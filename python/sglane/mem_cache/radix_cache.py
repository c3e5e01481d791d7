"""The radix tree with valid tails: which tokens have KV rows, in which pages, and who may not lose them.

Nodes own whole pages and are split at page boundaries only; only a leaf may end inside a page. A match is token-exact: whole pages, and then
perhaps the first tokens of one more page (of a tail, or of a full page that diverges), which the ledger copies into a private page.

With a host tier, device pages are a prefix of each path, and each page of the tree is on the device or has a READY host page. Which device pages
have a READY host page too (a twin) is residency's to say; the host pages of the others are in the nodes.
"""
from bisect import bisect_left
from contextlib import closing

import numpy as np
import numpy.typing as npt

from sglane.mem_cache.evict_policy import TierView, plan_eviction
from sglane.mem_cache.hiradix_cache import Residency
from sglane.mem_cache.leaf_queue import LeafQueue
from sglane.mem_cache.page_layout import NO_PAGES, LaneCounts, PageLayout, Pages
from sglane.mem_cache.radix_key import RadixKey, key_view
from sglane.mem_cache.radix_node import Node
from sglane.mem_cache.tree_walk import Insertion, Match, TailSource, Walk, walk_down

#: A leaf grows in place up to this many tokens; a longer one is continued by a child, so that growing and splitting stay cheap.
MAX_GROWN_TOKENS = 16384

DEVICE_VIEW: TierView[Node] = TierView(lambda node: node.pages, lambda node: node.num_device_children)


class RadixCache:
    """The one writer of tree shape, leases and the logical clock.

    element_bytes: TOKEN_BYTES or BIGRAM_BYTES of radix_key; a key of another type raises ValueError. residency: None without a host tier.
    """

    def __init__(self, layout: PageLayout, element_bytes: int, residency: Residency | None = None) -> None:
        self.layout = layout
        self.element_bytes = element_bytes
        self._page_bytes = layout.page_size * element_bytes
        self._residency = residency
        self._roots: dict[str, Node] = {}
        self._namespaces: dict[int, str] = {}  # root id -> its namespace
        self._next_id = 0
        self._clock = 0
        self._cached = layout.no_counts()
        self._evictable = layout.no_counts()
        self._leaves = LeafQueue()  # exactly the unpinned nodes with device pages and no child with any
        self._host_leaves = LeafQueue()  # exactly the nodes with host pages (twins included) and none below, pinned or not
        self._host_view = TierView(self._hosted_pages, lambda node: node.num_hosted_children)
        self._owners: npt.NDArray[np.int64] = np.zeros(residency.num_pages if residency else 0, np.int64)  # device page -> node id, 0: not the tree's
        self._nodes: dict[int, Node] = {}  # by id, only with a host tier
        self._loads: dict[int, Node] = {}  # open load ticket -> where it ends, leased

    def cached_counts(self) -> LaneCounts:
        """Device pages of the tree, by lane."""
        return self._cached.copy()

    def evictable_counts(self) -> LaneCounts:
        """Device pages that eviction can win, by lane: those of nodes without a lease on or below them."""
        return self._evictable.copy()

    def evictable_without(self, leases: list[Node]) -> LaneCounts:
        """What evictable_counts() would be if one lease of each of these nodes ended."""
        won = self._evictable.copy()
        for node in leases:
            won += node.device_lanes
            won -= node.unpin().device_lanes
        for node in leases:
            node.pin()
        return won

    def loads(self) -> dict[int, Node]:
        """Open load ticket -> where it ends, leased."""
        return self._loads

    def hint(self, key: RadixKey, namespace: str) -> int:
        """Tokens a match would find now. Changes nothing (but which children are tried first)."""
        query = key_view(key, self.element_bytes)
        root = self._roots.get(namespace)
        return 0 if root is None else walk_down(root, query, self._page_bytes, self.element_bytes).num_bytes // self.element_bytes

    def probe(self, start: Node, key: RadixKey) -> int:
        """Tokens of `key`, a whole key that begins with the path to `start`, that the tree has."""
        return walk_down(start, key_view(key, self.element_bytes), self._page_bytes, self.element_bytes).num_bytes // self.element_bytes

    def match(self, key: RadixKey, namespace: str) -> Match:
        """The longest prefix of `key` with KV rows, leased at once."""
        query = key_view(key, self.element_bytes)
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._new_node(None, b"", b"", b"", self.layout.no_counts())
            self._namespaces[root.id] = namespace
        walk = walk_down(root, query, self._page_bytes, self.element_bytes)
        num_bytes = walk.num_bytes
        node, source = self._cut_inside(walk), None
        self._clock += 1
        if walk.num_bytes_inside % self._page_bytes:
            assert walk.inside is not None
            num_tokens = walk.num_bytes_inside % self._page_bytes // self.element_bytes
            source = self._source(walk.inside, num_tokens)
            source.node.touch(self._clock)
            self.pin(source.node)
        top, pages, host_pages = node.lease_path(self._clock)
        self._settle_pins(node, top.device_lanes - node.device_lanes)
        return Match(node, pages, host_pages, source, num_bytes // self.element_bytes)

    def insert(self, start: Node, key: RadixKey, pages: Pages) -> Insertion:
        """Continue the leased node `start`, which is on the device, to the end of `key`. `key` is a whole key that begins with the path to `start`;
        `pages` has the rows after that. Pages that the tree takes belong to it from now on; those that it had on the host only are taken.

        A key that ends inside a page leaves a valid tail, unless the tree has those tokens already.
        """
        query = key_view(key, self.element_bytes)
        walk = walk_down(start, query, self._page_bytes, self.element_bytes)
        num_found = walk.num_bytes
        end = self._cut_inside(walk)
        num_whole = num_found - num_found % self._page_bytes
        canonical, host_pages = end.path_pages(start)
        num_had, dropped = len(canonical) + len(host_pages), NO_PAGES
        num_duplicates = self._promote_path(end, start, pages[len(canonical) : num_had]) if len(host_pages) else 0
        num_taken = len(host_pages)
        if num_found < len(query):
            dropped = self._drop_superseded_by(end, query[num_whole : num_whole + self._page_bytes])
            offered = pages[num_had : -(-(len(query) - start.end) // self._page_bytes)]
            num_taken += len(offered)
            end = self._attach(end, bytes(query[num_whole:]), offered, own_leases=1 if end is start else 0)
        self._clock += 1
        end.touch(self._clock)
        self._settle(end, None, None)
        return Insertion(canonical, num_taken, num_duplicates, end, dropped)

    def pin(self, node: Node) -> None:
        """Take a lease that ends at `node`."""
        top = node.pin()
        self._settle_pins(node, top.device_lanes - node.device_lanes)

    def unpin(self, node: Node) -> Pages:
        """End a lease. Returns device pages that leave the tree: a tail that was superseded while it was leased."""
        top = node.unpin()
        self._settle_pins(node, node.device_lanes - top.device_lanes)
        parent = node.parent
        if parent is None or node.is_pinned or len(node.key) >= self._page_bytes:
            return NO_PAGES
        index = bisect_left(parent.heads, node.key)
        if index + 1 < len(parent.heads) and parent.heads[index + 1].startswith(node.key):
            return self._remove(node)
        return NO_PAGES

    def evict(self, deficit: LaneCounts) -> Pages | None:
        """Take the least recently used page suffixes that cover `deficit` from the device; returns all device pages that went. A page with a twin
        stays in the tree, on the host; one without goes with everything below it. None (and nothing is changed) if the deficit cannot be covered."""
        with closing(self._leaves.oldest()) as oldest:
            victims = plan_eviction(oldest, deficit, self.layout, DEVICE_VIEW)
        if victims is None:
            return None
        parts = [self._evict_suffix(victim.node, victim.num_pages) for victim in victims]
        return np.concatenate(parts) if parts else NO_PAGES

    def clear(self) -> tuple[Pages, Pages]:
        """Drop everything; only without leases. Returns the device pages and the host-only pages."""
        assert not any(root.pins for root in self._roots.values()), "the tree is cleared while leases are held"
        parts, hosts, stack = [], [], list(self._roots.values())
        while stack:
            node = stack.pop()
            parts.append(node.page_ids)
            hosts.append(node.host_ids)
            stack += node.children
            node.detach()
        self._roots.clear()
        self._namespaces.clear()
        self._nodes.clear()
        self._leaves.clear()
        self._host_leaves.clear()
        self._owners[:] = 0
        self._cached, self._evictable = self.layout.no_counts(), self.layout.no_counts()
        return np.frombuffer(b"".join(parts), np.int32), np.frombuffer(b"".join(hosts), np.int32)

    def roots(self) -> dict[str, Node]:
        """Namespace -> root (for audits)."""
        return self._roots

    def node_ids(self) -> list[int]:
        """Only with a host tier (for audits)."""
        return list(self._nodes)

    def leaves(self) -> LeafQueue:
        """Unpinned leaves of the device tier (for audits)."""
        return self._leaves

    def host_leaves(self) -> LeafQueue:
        """Leaves of the host tier (for audits)."""
        return self._host_leaves

    def owners(self) -> npt.NDArray[np.int64]:
        """int64 [device pages] id of the node that has the page, 0: none (only with a host tier)."""
        return self._owners

    # the host tier

    def load(self, node: Node, pages: Pages, ticket: int) -> Pages:
        """Host-only pages of the path to the leased `node` get device pages, in path order, which are LOADING until the ticket ends; until then
        it has a lease of its own. Returns the host pages."""
        assert self._residency is not None
        hosts = node.path_pages(node.root)[1]
        self._promote_path(node, node.root, pages)
        self._residency.begin_load(pages, ticket)
        self.pin(node)
        self._loads[ticket] = node
        return hosts

    def load_ended(self, ticket: int) -> Pages:
        """Ends the lease of a load. Returns pages that leave the tree."""
        return self.unpin(self._loads.pop(ticket))

    def device_end(self, node: Node) -> Node:
        """The node where the device part of the path to `node` ends; splits one that is partly on the device."""
        last = node.last_on_device
        return self._split(last, len(last.pages)) if last.host_ids else last

    def copies_committed(self, pages: Pages) -> None:
        """These device pages have twins now."""
        for node_id in np.unique(self._owners[pages]).tolist():
            if node_id:
                self._settle_host(self._nodes[node_id])

    def pages_of_hits(self, node: Node, min_hits: int) -> Pages:
        """Count a hit of the path to `node`. Returns the device pages that were hit min_hits times by now; the first time that is asked for
        needs no count."""
        root = node.root
        if min_hits == 1:
            return node.path_pages(root)[0]
        ids = [step.page_ids for step in node.path_from(root) if step.hit(min_hits) == min_hits]
        return np.frombuffer(b"".join(ids), np.int32)

    def evict_host(self, deficit: LaneCounts) -> int:
        """Take least recently used pages from the host, so that as much as possible of `deficit` is covered; returns how many went. Twins lose
        their copy, host-only pages leave the tree."""
        assert self._residency is not None
        with closing(self._host_leaves.oldest()) as oldest:
            victims = plan_eviction(oldest, deficit, self.layout, self._host_view, partial=True)
        assert victims is not None
        for node, num_pages in ((victim.node, victim.num_pages) for victim in victims):
            num_twins = num_pages - len(node.host_pages)
            gone = self._cut(node, max(node.num_pages - num_pages, len(node.pages)))
            assert not len(gone), "a device page went with a host-only one"
            if num_twins > 0:
                twins = node.pages[self._residency.is_ready(node.pages)]
                self._residency.drop_copies(twins[len(twins) - num_twins :])
                self._settle_host(node)
        return sum(victim.num_pages for victim in victims)

    def _source(self, node: Node, num_tokens: int) -> TailSource:
        """The first page of `node`, as far as its rows are there."""
        page, from_host = (int(node.pages[0]), False) if node.page_ids else (int(node.host_pages[0]), True)
        if self._residency is not None and not from_host:
            page, from_host = self._residency.source_of(page)
        return TailSource(node, page, num_tokens, from_host)

    def _cut_inside(self, walk: Walk) -> Node:
        """The node where the walk's whole pages end; splits the node in which the walk ended if they end there."""
        num_pages = walk.num_bytes_inside // self._page_bytes
        if walk.inside is None or num_pages == 0:
            return walk.node
        return self._split(walk.inside, num_pages)

    def _split(self, node: Node, num_pages: int) -> Node:
        """`node` keeps its last pages; returns the new node above it that has the first `num_pages`."""
        assert node.parent is not None
        pages = node.pages[:num_pages]
        hosts = node.host_pages[: num_pages - len(pages)]
        path_lanes = node.parent.device_lanes + self.layout.lane_counts(pages)
        upper = self._new_node(None, node.key[: num_pages * self._page_bytes], pages.tobytes(), hosts.tobytes(), path_lanes)
        node.split_upper(upper, self._page_bytes)
        self._settle(node, None, None)
        if self._residency is not None:
            self._owners[pages] = upper.id
            node.set_hosted(len(self._hosted_pages(node)))
            upper.set_hosted(len(self._hosted_pages(upper)))
            upper.hosted_children_changed(1 if node.is_hosted else 0)
            self._settle_host(node)
            self._settle_host(upper)
        return upper

    def _attach(self, parent: Node, key: bytes, pages: Pages, own_leases: int) -> Node:
        """New pages at the end of `parent`, which is on the device: it grows in place if nobody else's lease ends there, else it gets a child."""
        lanes = self.layout.lane_counts(pages)
        fits = len(parent.key) + len(key) <= MAX_GROWN_TOKENS * self.element_bytes
        if parent.parent is not None and not parent.children and parent.leases == own_leases and fits and not parent.hits:
            parent.append(key, pages, lanes)
            self._taken(parent, pages)
            self._settle(parent, lanes, None if parent.is_pinned else lanes)
            return parent
        child = self._new_node(parent, key, pages.tobytes(), b"", parent.device_lanes + lanes)
        parent.add_child(child, self._page_bytes)
        parent.device_children_changed(1)
        self._taken(child, pages)
        self._settle(child, lanes, lanes)
        return child

    def _promote_path(self, end: Node, top: Node, pages: Pages) -> int:
        """Host-only pages between `top` and `end` get these device pages. Returns how many of those had copies of their own."""
        assert self._residency is not None
        start, num_duplicates = 0, 0
        for node in end.path_from(top):
            if not node.host_ids:
                continue
            parent = node.parent
            assert parent is not None
            given = pages[start : start + len(node.host_pages)]
            start += len(given)
            if not node.page_ids:
                parent.device_children_changed(1)
            lanes = self.layout.lane_counts(given)
            hosts = node.promote(given, node.device_lanes + lanes)
            num_duplicates += self._residency.promote(given, hosts)
            self._taken(node, given)
            self._settle(node, lanes, None if node.is_pinned else lanes)
        assert start == len(pages), f"{len(pages)} pages are given to {start} host-only pages"
        return num_duplicates

    def _drop_superseded_by(self, parent: Node, head: memoryview) -> Pages:
        """Drop the unpinned tail below `parent` that is a prefix of `head`. There is at most one, and it is the left neighbour of head's place:
        whatever lies between them begins with the tail too, and would have superseded it."""
        if not parent.children:
            return NO_PAGES
        tail, common = parent.best_child(head, self._page_bytes)
        if tail.is_pinned or common < len(tail.key):
            return NO_PAGES
        return self._remove(tail)

    def _evict_suffix(self, node: Node, num_pages: int) -> Pages:
        """The last device pages of an unpinned node go; below it are host-only ones."""
        first = len(node.pages) - num_pages
        pages = node.pages[first:]
        if self._residency is None:
            return self._cut(node, first)
        ready = self._residency.is_ready(pages)
        num_demoted = num_pages if ready.all() else int(ready.argmin())
        gone = self._cut(node, first + num_demoted) if num_demoted < num_pages else NO_PAGES
        if not num_demoted:
            return gone
        demoted = pages[:num_demoted]
        lanes = self.layout.lane_counts(demoted)
        node.demote(self._residency.demote(demoted), lanes)
        self._owners[demoted] = 0
        if not node.page_ids and node.parent is not None:
            node.parent.device_children_changed(-1)
        self._settle(node, -lanes, -lanes)
        self._settle_host(node)
        return np.concatenate((demoted, gone))

    def _cut(self, node: Node, num_kept: int) -> Pages:
        """An unpinned node keeps its first pages; the others, and all that is below, leave the tree. Returns device pages."""
        if num_kept == node.num_pages:
            return NO_PAGES
        below = list(node.children)
        for child in below:  # grows
            below += child.children
        for child in reversed(below):
            self._remove(child)
        if not num_kept:
            return self._remove(node)
        lanes = self.layout.lane_counts(node.pages[num_kept:])
        pages, hosts = node.cut(num_kept, self._page_bytes, lanes)
        if self._residency is not None:
            self._owners[pages] = 0
            self._residency.free(hosts)
            self._settle_host(node)
        self._settle(node, -lanes, -lanes)
        return pages

    def _remove(self, node: Node) -> Pages:
        """An unpinned leaf leaves the tree. Returns its device pages."""
        parent = node.parent
        assert parent is not None and not node.children and not node.is_pinned, f"node {node.id} cannot be removed"
        pages, lanes = node.pages, self.layout.lane_counts(node.pages)
        if self._residency is not None:
            self._host_count(node, 0)
            self._host_leaves.update(node, False)
            self._owners[pages] = 0
            self._residency.free(node.host_pages)
            del self._nodes[node.id]
        if node.page_ids:
            parent.device_children_changed(-1)
        parent.remove_child(node, self._page_bytes)
        self._settle(node, -lanes, -lanes)
        self._settle(parent, None, None)
        return pages

    def _new_node(self, parent: Node | None, key: bytes, page_ids: bytes, host_ids: bytes, path_lanes: LaneCounts) -> Node:
        self._next_id += 1
        node = Node(self._next_id, parent, key, page_ids, host_ids, path_lanes)
        if self._residency is not None:
            self._nodes[node.id] = node
        return node

    def _taken(self, node: Node, pages: Pages) -> None:
        """The node has these device pages now."""
        if self._residency is not None:
            self._owners[pages] = node.id
            self._settle_host(node)

    def _hosted_pages(self, node: Node) -> Pages:
        """int32 [n] the node's host pages in order: the twins of its device pages, then host-only pages."""
        assert self._residency is not None
        twins = self._residency.copy[node.pages[self._residency.is_ready(node.pages)]]
        return np.concatenate((twins, node.host_pages)) if node.host_ids else twins

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

    def _settle_pins(self, node: Node, evictable_delta: LaneCounts) -> None:
        """After a change of leases at `node`: the last node of the path that is on the device may be another one."""
        self._settle(node, None, evictable_delta)
        if not node.page_ids:
            self._settle_leaf(node.last_on_device)

    def _settle_leaf(self, node: Node) -> None:
        if node.id in self._namespaces:
            if not node.children and not node.pins:
                del self._roots[self._namespaces.pop(node.id)]
                self._nodes.pop(node.id, None)
            return
        self._leaves.update(node, not node.is_pinned and node.num_device_children == 0 and bool(node.page_ids))

    def _settle_host(self, node: Node) -> None:
        """Count the node's pages on the host anew. Called after every change of them, or of the children that have any."""
        self._host_count(node, len(self._hosted_pages(node)))
        self._host_leaves.update(node, node.num_hosted > 0 and node.num_hosted_children == 0)

    def _host_count(self, node: Node, num_hosted: int) -> None:
        """Where this changes whether anything on or below a node is hosted, its parent counts anew too."""
        was_hosted = node.is_hosted
        node.set_hosted(num_hosted)
        while node.is_hosted != was_hosted and node.parent is not None:
            parent, change = node.parent, 1 if node.is_hosted else -1
            was_hosted = parent.is_hosted
            parent.hosted_children_changed(change)
            self._host_leaves.update(parent, parent.num_hosted > 0 and parent.num_hosted_children == 0)
            node = parent
