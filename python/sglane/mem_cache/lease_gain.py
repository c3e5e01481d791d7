"""What eviction could win if some leases ended."""
from collections.abc import Sequence
from heapq import heappop, heappush

from sglane.mem_cache.page_layout import LaneCounts, PageLayout
from sglane.mem_cache.radix_node import Node


def lanes_freed_by(leases: Sequence[Node], layout: PageLayout) -> LaneCounts:
    """int64 [cp_size] pages of nodes that would have no lease on or below them without one lease at each of `leases` (a node may be there more
    than once). A node loses a pin with each of these leases that ends there, and with each child that loses its last one."""
    freed = layout.no_counts()
    queue: list[tuple[int, int]] = []  # (-end, id): children before their parents
    nodes: dict[int, Node] = {}
    num_lost: dict[int, int] = {}

    def lose_pin(node: Node) -> None:
        if node.id not in nodes:
            nodes[node.id] = node
            heappush(queue, (-node.end, node.id))
        num_lost[node.id] = num_lost.get(node.id, 0) + 1

    for node in leases:
        lose_pin(node)
    while queue:
        node = nodes[heappop(queue)[1]]
        parent = node.parent
        if parent is not None and node.pins == num_lost[node.id]:
            freed += node.path_lanes - parent.path_lanes
            lose_pin(parent)
    return freed
