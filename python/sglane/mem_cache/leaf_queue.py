"""Leaves of one tier in the order in which they would be evicted."""
import heapq
from collections.abc import Generator

from sglane.mem_cache.radix_node import Node


class LeafQueue:
    """The leaves of a tier, least recently used first, ties by node id.

    Each leaf has at most one entry in the heap. A node is only ever used later, so an entry may name an older use than the node's last one: it is
    corrected when it is met, and entries of nodes that are no longer leaves are dropped then.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # (last_used, id, node)
        self._queued: set[int] = set()  # ids in the heap

    @property
    def leaves(self) -> dict[int, Node]:
        """Node id -> leaf (for audits)."""
        return self._leaves

    def unqueued(self) -> list[int]:
        """Ids of leaves that oldest() would miss (for audits)."""
        queued = {node_id for _, node_id, _ in self._heap}
        return [node_id for node_id in self._leaves if node_id not in queued or node_id not in self._queued]

    def update(self, node: Node, is_leaf: bool) -> None:
        if not is_leaf:
            self._leaves.pop(node.id, None)
            return
        self._leaves[node.id] = node
        if node.id not in self._queued:
            self._queued.add(node.id)
            heapq.heappush(self._heap, (node.last_used, node.id, node))
            if len(self._heap) > 2 * len(self._leaves) + 1024:
                self._rebuild()

    def clear(self) -> None:
        self._leaves.clear()
        self._queued.clear()
        self._heap.clear()

    def oldest(self) -> Generator[Node, None, None]:
        """Unpinned leaves in order. The tree must not change before the iterator is closed."""
        met = []
        try:
            while self._heap:
                last_used, node_id, node = self._heap[0]
                if node_id not in self._leaves:
                    heapq.heappop(self._heap)
                    self._queued.discard(node_id)
                elif last_used != node.last_used:
                    heapq.heapreplace(self._heap, (node.last_used, node_id, node))
                else:
                    met.append(heapq.heappop(self._heap))
                    if not node.is_pinned:
                        yield node
        finally:
            for entry in met:
                heapq.heappush(self._heap, entry)

    def _rebuild(self) -> None:
        """Drop the entries of nodes that are no longer leaves."""
        self._heap = [(node.last_used, node.id, node) for node in self._leaves.values()]
        heapq.heapify(self._heap)
        self._queued = set(self._leaves)
