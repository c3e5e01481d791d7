"""How far a key leads into the tree, and what the tree's verbs answer. On which tier pages are makes no difference here."""
from typing import NamedTuple

from sglane.mem_cache.page_layout import Pages
from sglane.mem_cache.radix_node import Node


class TailSource(NamedTuple):
    """The page whose first tokens continue a hit beyond its whole pages."""

    node: Node
    page: int
    num_tokens: int  # 0 < num_tokens < page_size
    from_host: bool  # it is a host page


class Match(NamedTuple):
    """A hit: whole pages on the device, then host-only ones, then perhaps a part of a page. Leases on `node` and on the source's node are taken."""

    node: Node  # the whole pages end here
    pages: Pages  # int32
    host_pages: Pages  # int32
    source: TailSource | None
    num_tokens: int


class Insertion(NamedTuple):
    canonical: Pages  # device pages the tree had already: they replace the first ones offered
    num_taken: int  # pages after those, which now belong to the tree
    num_duplicates: int  # of them, had a copy of their own where the tree had a host page; it is given up
    end: Node  # the inserted whole pages end here (or above, if the key ended inside a page)
    dropped: Pages  # device pages that left the tree: superseded tails


class Walk(NamedTuple):
    node: Node  # matched completely, ends at a page boundary
    inside: Node | None  # the child in which the walk ended
    num_bytes_inside: int

    @property
    def num_bytes(self) -> int:
        """Of the query, matched from the root on."""
        return self.node.end + self.num_bytes_inside


def walk_down(node: Node, query: memoryview, page_bytes: int, element_bytes: int) -> Walk:
    """Follow `query` (bytes of a whole key, known to match down to the end of `node`) further. One slice and one memcmp for each node whose child
    that was met last is met again."""
    end = len(query)
    while node.end < end:
        while node.end < end and (child := node.recent) is not None and child.key.startswith(query[child.span]):
            node = child
        if node.end > end or len(node.key) % page_bytes:  # the last child is longer than the rest of the query, or a tail
            parent, num_bytes = node.parent, len(node.key)
            assert parent is not None
            if node.end >= end or num_bytes > page_bytes:
                return Walk(parent, node, min(num_bytes, end - parent.end))
            node = parent  # another child may begin with this tail and go on
        if node.end == end or not node.children:
            break
        child, common = node.best_child(query[node.end :], page_bytes)
        if common < len(child.key) or common % page_bytes:
            common -= common % element_bytes
            return Walk(node, child if common else None, common)
        node.meet(child)
        node = child
    return Walk(node, None, 0)
