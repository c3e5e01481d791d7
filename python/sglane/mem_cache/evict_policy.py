"""Choosing what to evict: a pure planner over a small view of the tree.

A victim is a page suffix of a node without children and without leases. Leaves go in the order of the logical clock (ties by node id);
when all children of a node have gone completely, it is a leaf itself. Only pages that lower a lane's deficit, and what must go before them,
stay in the plan.
"""
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from sglane.mem_cache.page_layout import LaneCounts, Lanes, PageLayout, Pages


class EvictableNode(Protocol):
    """What the planner sees of a tree node."""

    @property
    def id(self) -> int: ...
    @property
    def last_used(self) -> int: ...
    @property
    def num_children(self) -> int: ...
    @property
    def is_pinned(self) -> bool:
        """A lease ends here or below, or it is a root: it must stay even without children."""
    @property
    def parent(self) -> "EvictableNode | None": ...
    @property
    def pages(self) -> Pages: ...


NodeT = TypeVar("NodeT", bound=EvictableNode)


@dataclass(frozen=True)
class Victim(Generic[NodeT]):
    """The last `num_pages` pages of a node (all of them: the node goes)."""

    node: NodeT
    num_pages: int


def plan_eviction(oldest: Iterator[NodeT], deficit: LaneCounts, layout: PageLayout) -> list[Victim[NodeT]] | None:
    """Victims whose pages cover `deficit` lane by lane, children before parents; None if that is impossible.

    oldest: unpinned leaves, by (last_used, id). deficit: int64 [cp_size] pages to win in each lane.
    """
    chosen = _take_oldest(oldest, deficit, layout)
    return None if chosen is None else _give_back(chosen, deficit, layout)


def _take_oldest(oldest: Iterator[NodeT], deficit: LaneCounts, layout: PageLayout) -> list[NodeT] | None:
    """Whole nodes in eviction order until the deficit is covered."""
    missing = deficit.copy()
    chosen: list[NodeT] = []
    unlocked: list[tuple[int, int, NodeT]] = []  # heap of inner nodes whose children were all chosen
    num_left: dict[int, int] = {}  # node id -> children that were not chosen
    leaf = next(oldest, None)
    while (missing > 0).any():
        if unlocked and (leaf is None or unlocked[0][:2] < (leaf.last_used, leaf.id)):
            node = heapq.heappop(unlocked)[2]
        elif leaf is not None:
            node, leaf = leaf, next(oldest, None)
        else:
            return None
        chosen.append(node)
        missing -= layout.lane_counts(node.pages)
        parent = _same_kind(node)
        if parent is None or parent.is_pinned:
            continue
        num_left[parent.id] = num_left.get(parent.id, parent.num_children) - 1
        if num_left[parent.id] == 0:
            heapq.heappush(unlocked, (parent.last_used, parent.id, parent))
    return chosen


def _give_back(chosen: list[NodeT], deficit: LaneCounts, layout: PageLayout) -> list[Victim[NodeT]]:
    """The reverse pass: from the most recently used on, keep every page that turned out to be unnecessary.

    A node below a victim must go completely. Parents come after their children in `chosen`, so here they are decided first.
    """
    surplus = -deficit
    for node in chosen:
        surplus += layout.lane_counts(node.pages)
    victims: list[Victim[NodeT]] = []
    gone_below: set[int] = set()  # ids of nodes that are evicted: their children must go completely
    for node in reversed(chosen):
        num_taken = len(node.pages)
        parent = node.parent
        if parent is None or parent.id not in gone_below:
            lanes = layout.lanes(node.pages)
            num_kept = _num_spare(lanes, surplus)
            surplus -= np.bincount(lanes[:num_kept], minlength=layout.cp_size)
            num_taken -= num_kept
        if num_taken:
            victims.append(Victim(node, num_taken))
            gone_below.add(node.id)
    victims.reverse()
    return victims


def _num_spare(lanes: Lanes, surplus: LaneCounts) -> int:
    """Length of the longest prefix of a node's pages that holds at most surplus[lane] pages of each lane."""
    num_spare = len(lanes)
    for lane, spare in enumerate(surplus.tolist()):
        mine = np.flatnonzero(lanes == lane)
        if len(mine) > spare:
            num_spare = min(num_spare, int(mine[spare]))
    return num_spare


def _same_kind(node: NodeT) -> NodeT | None:
    """The parent; a tree is made of one kind of node, which the protocol cannot say."""
    return node.parent  # type: ignore[return-value]
