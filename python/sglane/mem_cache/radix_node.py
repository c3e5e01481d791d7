"""A node of the radix tree: some whole pages of one sequence, and the sorted children that continue it."""
from bisect import bisect_left
from typing import Optional

import numpy as np

from sglane.mem_cache.page_layout import LaneCounts, Pages
from sglane.mem_cache.radix_key import common_prefix_bytes

PAGE_ID_BYTES = 4


class Node:
    """One edge of the tree. Only a leaf's key may end inside its last page (a valid tail). Changed by the tree only, through these verbs.

    key: bytes of the key elements, whose size only the tree knows.
    end: bytes from the root to the end of this node. span: where `key` lies in the bytes of a whole key.
    page_ids: bytes of the int32 page ids (joined much faster than arrays), ceil(elements / page_size).
    path_lanes: pages of each lane on the path from the root to this node, itself included; an inner node never changes, so this stays true.
    heads: sorted keys of the children's first pages (shorter for a tail); children: in the same order.
    recent: the child that was met last (it is tried first), None: not known.
    leases: leases that end at this node. pins: leases + children with pins > 0; a node with pins must stay.
    """

    __slots__ = (
        "id", "parent", "key", "end", "span", "page_ids", "path_lanes", "heads", "children", "recent", "last_used", "leases", "pins", "queued",
    )

    def __init__(self, node_id: int, parent: Optional["Node"], key: bytes, pages: Pages, path_lanes: LaneCounts) -> None:
        self.id = node_id
        self.parent = parent
        self._set_key(key, len(key) if parent is None else parent.end + len(key))
        self.page_ids = pages.tobytes()
        self.path_lanes = path_lanes
        self.heads: list[bytes] = []
        self.children: list[Node] = []
        self.last_used = 0  # logical clock
        self.leases = 0
        self.pins = 0
        self.queued = -1  # last_used of this node's entry in the eviction queue, -1: none
        self.recent: Node | None = None

    @property
    def pages(self) -> Pages:
        """int32 [n], read-only."""
        return np.frombuffer(self.page_ids, np.int32)

    @property
    def num_children(self) -> int:
        return len(self.children)

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0 or self.parent is None

    def best_child(self, query: memoryview, page_bytes: int) -> tuple["Node", int]:
        """The child that shares most with `query` (bytes), and how many bytes (perhaps a part of an element); needs children.

        Sorted by bytes, the longest common prefix is that of a neighbour of the place where the query's first page would be.
        """
        head = bytes(query[:page_bytes])
        index = bisect_left(self.heads, head)
        if index < len(self.heads) and self.heads[index] == head:
            child = self.children[index]
            return child, common_prefix_bytes(child.key, query)
        best, num_bytes = self.children[min(index, len(self.children) - 1)], 0
        for child in self.children[max(index - 1, 0) : index + 1]:
            common = common_prefix_bytes(child.key, query)
            if common > num_bytes:
                best, num_bytes = child, common
        return best, num_bytes

    def touch(self, now: int) -> None:
        """Mark the path up to the root as used."""
        node: Node | None = self
        while node is not None and node.last_used != now:
            node.last_used = now
            node = node.parent

    def meet(self, child: "Node") -> None:
        self.recent = child

    def mark_queued(self, last_used: int) -> None:
        self.queued = last_used

    def pin(self) -> "Node":
        """Take a lease that ends here. Returns the nearest node that was pinned before (or the root): the path below it is newly pinned."""
        self.leases += 1
        node = self
        node.pins += 1
        while node.pins == 1 and node.parent is not None:
            node = node.parent
            node.pins += 1
        return node

    def lease_path(self, now: int) -> tuple["Node", Pages]:
        """What touch(), pin() and pages_below(root) do, in one pass over the path: (what pin() returns, int32 [n] read-only)."""
        self.leases += 1
        parts = []
        node = self
        while True:
            node.last_used = now
            node.pins = num_pins = node.pins + 1
            parent = node.parent
            if parent is None or num_pins > 1:
                break
            parts.append(node.page_ids)
            node = parent
        top = node
        while parent is not None:
            parts.append(node.page_ids)
            node.last_used = now
            node, parent = parent, parent.parent
        node.last_used = now
        parts.reverse()
        return top, np.frombuffer(b"".join(parts), np.int32)

    def unpin(self) -> "Node":
        """End a lease. Returns the nearest node that stays pinned (or the root): the path below it is no longer pinned."""
        assert self.leases > 0, f"node {self.id} has no lease to end"
        self.leases -= 1
        node = self
        node.pins -= 1
        while node.pins == 0 and node.parent is not None:
            node = node.parent
            node.pins -= 1
        return node

    def add_child(self, child: "Node", page_bytes: int) -> None:
        head = child.key[:page_bytes]
        index = bisect_left(self.heads, head)
        assert index == len(self.heads) or self.heads[index] != head, f"node {self.id} has two children that start alike"
        self.heads.insert(index, head)
        self.children.insert(index, child)

    def remove_child(self, child: "Node", page_bytes: int) -> None:
        index = bisect_left(self.heads, child.key[:page_bytes])
        assert self.children[index] is child, f"node {child.id} is not where its parent {self.id} should have it"
        del self.heads[index], self.children[index]
        if self.recent is child:
            self.recent = None
        child.parent = None

    def split_upper(self, upper: "Node", page_bytes: int) -> None:
        """`upper` takes over the first part of the key and the pages; this node keeps its identity, its end, leases and children."""
        parent = self.parent
        assert parent is not None and len(upper.key) % page_bytes == 0 and 0 < len(upper.key) < len(self.key)
        index = bisect_left(parent.heads, self.key[:page_bytes])
        parent.children[index] = upper  # the head is the same
        if parent.recent is self:
            parent.recent = upper
        upper.parent = parent
        upper._set_key(upper.key, parent.end + len(upper.key))
        upper.last_used = self.last_used
        upper.pins = 1 if self.pins else 0
        self._set_key(self.key[len(upper.key) :], self.end)
        self.page_ids = self.page_ids[len(upper.page_ids) :]
        self.parent = upper
        upper.heads = [self.key[:page_bytes]]
        upper.children = [self]
        upper.recent = self

    def append(self, key: bytes, pages: Pages, lanes: LaneCounts) -> None:
        """Grow a leaf at its end."""
        assert not self.children, f"node {self.id} has children and cannot grow"
        self._set_key(self.key + key, self.end + len(key))
        self.page_ids += pages.tobytes()
        self.path_lanes = self.path_lanes + lanes

    def drop_suffix(self, num_pages: int, page_bytes: int, lanes: LaneCounts) -> None:
        """A leaf loses its last pages (not all of them)."""
        num_kept = len(self.pages) - num_pages
        assert not self.children and num_kept > 0
        key = self.key[: num_kept * page_bytes]
        self._set_key(key, self.end - len(self.key) + len(key))
        self.page_ids = self.page_ids[: num_kept * PAGE_ID_BYTES]
        self.path_lanes = self.path_lanes - lanes

    def pages_below(self, top: "Node") -> Pages:
        """int32 [n], read-only: pages of the path from below `top` down to this node."""
        parts = []
        node: Node | None = self
        while node is not top:
            assert node is not None, f"node {top.id} is not above node {self.id}"
            parts.append(node.page_ids)
            node = node.parent
        parts.reverse()
        return np.frombuffer(b"".join(parts), np.int32)

    def _set_key(self, key: bytes, end: int) -> None:
        self.key, self.end = key, end
        self.span = slice(end - len(key), end)
