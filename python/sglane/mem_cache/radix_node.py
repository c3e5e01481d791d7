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
    page_ids: bytes of the int32 ids of the first pages, those on the device (joined much faster than arrays).
    host_ids: the same of the host pages of the others, host-only; together ceil(elements / page_size). What follows them is host-only too.
    path_lanes: device pages of each lane on the path from the root to this node, itself included; true while the node has device pages: all
        above it are on the device then, and stay there. device_lanes is true always.
    heads: sorted keys of the children's first pages (shorter for a tail); children: in the same order.
    recent: the child that was met last (it is tried first), None: not known.
    leases: leases that end at this node. pins: leases + children with pins > 0; a node with pins must stay, on both tiers.
    hits: admitted requests that found it, as far as the tree was told to count them.
    num_device_children: children with device pages. num_hosted: its pages with a copy on the host, twins included.
    num_hosted_children: children with such pages on or below them.
    """

    __slots__ = (
        "id", "parent", "key", "end", "span", "page_ids", "host_ids", "path_lanes", "heads", "children", "recent", "last_used", "leases", "pins",
        "hits", "num_device_children", "num_hosted", "num_hosted_children",
    )

    def __init__(self, node_id: int, parent: Optional["Node"], key: bytes, page_ids: bytes, host_ids: bytes, path_lanes: LaneCounts) -> None:
        self.id = node_id
        self.parent = parent
        self._set_key(key, len(key) if parent is None else parent.end + len(key))
        self.page_ids = page_ids
        self.host_ids = host_ids
        self.path_lanes = path_lanes
        self.heads: list[bytes] = []
        self.children: list[Node] = []
        self.last_used = 0  # logical clock
        self.leases = 0
        self.pins = 0
        self.hits = 0
        self.num_device_children = 0
        self.num_hosted = 0
        self.num_hosted_children = 0
        self.recent: Node | None = None

    @property
    def pages(self) -> Pages:
        """int32 [n] on the device, read-only."""
        return np.frombuffer(self.page_ids, np.int32)

    @property
    def host_pages(self) -> Pages:
        """int32 [n] host-only ones, read-only."""
        return np.frombuffer(self.host_ids, np.int32)

    @property
    def num_pages(self) -> int:
        return (len(self.page_ids) + len(self.host_ids)) // PAGE_ID_BYTES

    @property
    def root(self) -> "Node":
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0 or self.parent is None

    @property
    def is_hosted(self) -> bool:
        """Pages on or below it have a copy on the host."""
        return self.num_hosted > 0 or self.num_hosted_children > 0

    @property
    def last_on_device(self) -> "Node":
        """The last node of the path with device pages, or the root."""
        node = self
        while not node.page_ids and node.parent is not None:
            node = node.parent
        return node

    @property
    def device_lanes(self) -> LaneCounts:
        """int64 [cp_size] device pages on the path from the root to this node."""
        return self.last_on_device.path_lanes

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

    def hit(self, limit: int) -> int:
        """Count one more request that found this node, up to `limit`; returns the count."""
        self.hits = min(self.hits + 1, limit)
        return self.hits

    def set_hosted(self, num_pages: int) -> None:
        self.num_hosted = num_pages

    def hosted_children_changed(self, change: int) -> None:
        self.num_hosted_children += change

    def device_children_changed(self, change: int) -> None:
        self.num_device_children += change

    def pin(self) -> "Node":
        """Take a lease that ends here. Returns the nearest node that was pinned before (or the root): the path below it is newly pinned."""
        self.leases += 1
        node = self
        node.pins += 1
        while node.pins == 1 and node.parent is not None:
            node = node.parent
            node.pins += 1
        return node

    def lease_path(self, now: int) -> tuple["Node", Pages, Pages]:
        """What touch(), pin() and path_pages(root) do, in one pass over the path: (what pin() returns, device pages, host-only pages)."""
        self.leases += 1
        parts, hosts = [], []
        node = self
        while True:
            node.last_used = now
            node.pins = num_pins = node.pins + 1
            parent = node.parent
            if parent is None or num_pins > 1:
                break
            parts.append(node.page_ids)
            if node.host_ids:
                hosts.append(node.host_ids)
            node = parent
        top = node
        while parent is not None:
            parts.append(node.page_ids)
            if node.host_ids:
                hosts.append(node.host_ids)
            node.last_used = now
            node, parent = parent, parent.parent
        node.last_used = now
        return top, _joined(parts), _joined(hosts)

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

    def detach(self) -> None:
        """The whole tree goes: no cycle of references keeps this node's memory."""
        self.parent = self.recent = None
        self.children = []

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
        upper.hits = self.hits
        self._set_key(self.key[len(upper.key) :], self.end)
        self.page_ids = self.page_ids[len(upper.page_ids) :]
        self.host_ids = self.host_ids[len(upper.host_ids) :]
        self.parent = upper
        upper.heads = [self.key[:page_bytes]]
        upper.children = [self]
        upper.recent = self
        upper.num_device_children = 1 if self.page_ids else 0

    def append(self, key: bytes, pages: Pages, lanes: LaneCounts) -> None:
        """Grow a leaf at its end."""
        assert not self.children and not self.host_ids, f"node {self.id} has children or host-only pages and cannot grow"
        self._set_key(self.key + key, self.end + len(key))
        self.page_ids += pages.tobytes()
        self.path_lanes = self.path_lanes + lanes

    def cut(self, num_kept: int, page_bytes: int, lanes: LaneCounts) -> tuple[Pages, Pages]:
        """A leaf loses its pages after the first `num_kept` > 0. lanes: how many device pages of each lane these are. Returns them: device pages,
        host-only pages."""
        assert not self.children and num_kept > 0, f"node {self.id} cannot be cut to {num_kept} pages"
        num_device = min(num_kept, len(self.page_ids) // PAGE_ID_BYTES)
        gone = self.pages[num_device:], self.host_pages[num_kept - num_device :]
        key = self.key[: num_kept * page_bytes]
        self._set_key(key, self.end - len(self.key) + len(key))
        self.page_ids = self.page_ids[: num_device * PAGE_ID_BYTES]
        self.host_ids = self.host_ids[: (num_kept - num_device) * PAGE_ID_BYTES]
        self.path_lanes = self.path_lanes - lanes
        return gone

    def promote(self, pages: Pages, path_lanes: LaneCounts) -> Pages:
        """Its host-only pages get these device pages. Returns the host pages, now twins."""
        hosts = self.host_pages
        assert len(hosts) == len(pages), f"node {self.id} has {len(hosts)} host-only pages and is given {len(pages)}"
        self.page_ids += pages.tobytes()
        self.host_ids = b""
        self.path_lanes = path_lanes
        return hosts

    def demote(self, hosts: Pages, lanes: LaneCounts) -> None:
        """Its last len(hosts) device pages go, these host pages take their place."""
        self.page_ids = self.page_ids[: len(self.page_ids) - len(hosts) * PAGE_ID_BYTES]
        self.host_ids = hosts.tobytes() + self.host_ids
        self.path_lanes = self.path_lanes - lanes

    def path_pages(self, top: "Node") -> tuple[Pages, Pages]:
        """int32 [n] each, read-only: device pages, then host-only pages of the path from below `top` down to this node."""
        parts, hosts = [], []
        node: Node | None = self
        while node is not top:
            assert node is not None, f"node {top.id} is not above node {self.id}"
            parts.append(node.page_ids)
            hosts.append(node.host_ids)
            node = node.parent
        return _joined(parts), _joined(hosts)

    def path_from(self, top: "Node") -> list["Node"]:
        """The nodes from below `top` down to this one."""
        nodes = []
        node: Node | None = self
        while node is not top:
            assert node is not None, f"node {top.id} is not above node {self.id}"
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def _set_key(self, key: bytes, end: int) -> None:
        self.key, self.end = key, end
        self.span = slice(end - len(key), end)


def _joined(parts: list[bytes]) -> Pages:
    """int32 [n] of ids that were collected upwards."""
    parts.reverse()
    return np.frombuffer(b"".join(parts), np.int32)
