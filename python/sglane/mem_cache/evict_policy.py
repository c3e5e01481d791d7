"""Choosing what to evict from a tier: a pure planner over a small view of the tree.

A victim is a suffix of the pages that a node has in the tier; no node below it may have any, and no lease may end there or below. Leaves go in
the order of the logical clock (ties by node id); when all children of a node have gone completely, it is a leaf itself. Only pages that lower a
lane's deficit, and what must go before them, stay in the plan.
"""
import heapq
from collections.abc import Callable, Iterator
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
    def is_pinned(self) -> bool:
        """A lease ends here or below, or it is a root: it must stay even without children."""
    @property
    def parent(self) -> "EvictableNode | None": ...


NodeT = TypeVar("NodeT", bound=EvictableNode)


@dataclass(frozen=True)
class TierView(Generic[NodeT]):
    """What a tier has of a node. pages: int32 [n], may be none between nodes that have some. num_children: children with pages in the tier on or
    below them."""

    pages: Callable[[NodeT], Pages]
    num_children: Callable[[NodeT], int]


@dataclass(frozen=True)
class Victim(Generic[NodeT]):
    """The last `num_pages` pages that a node has in the tier."""

    node: NodeT
    num_pages: int


def plan_eviction(
    oldest: Iterator[NodeT], deficit: LaneCounts, layout: PageLayout, view: TierView[NodeT], *, partial: bool = False
) -> list[Victim[NodeT]] | None:
    """Victims whose pages cover `deficit` lane by lane, children before parents; None if that is impossible (partial: cover what can be).

    oldest: unpinned leaves of the tier, by (last_used, id). deficit: int64 [cp_size] pages to win in each lane.
    """
    chosen, missing = _take_oldest(oldest, deficit, layout, view)
    if missing.any() and not partial:
        return None
    return _give_back(chosen, deficit - missing, layout, view)


def _take_oldest(
    oldest: Iterator[NodeT], deficit: LaneCounts, layout: PageLayout, view: TierView[NodeT]
) -> tuple[list[NodeT], LaneCounts]:
    """Whole nodes in eviction order until the deficit is covered, and what of it could not be."""
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
            break
        chosen.append(node)
        missing -= layout.lane_counts(view.pages(node))
        parent = _same_kind(node)
        if parent is None or parent.is_pinned:
            continue
        num_left[parent.id] = num_left.get(parent.id, view.num_children(parent)) - 1
        if num_left[parent.id] == 0:
            heapq.heappush(unlocked, (parent.last_used, parent.id, parent))
    return chosen, np.maximum(missing, 0)


def _give_back(chosen: list[NodeT], deficit: LaneCounts, layout: PageLayout, view: TierView[NodeT]) -> list[Victim[NodeT]]:
    """The reverse pass: from the most recently used on, keep every page that turned out to be unnecessary.

    A node below a victim must go completely. Parents come after their children in `chosen`, so here they are decided first.
    """
    surplus = -deficit
    for node in chosen:
        surplus += layout.lane_counts(view.pages(node))
    victims: list[Victim[NodeT]] = []
    gone_below: set[int] = set()  # ids of nodes whose children must go completely
    for node in reversed(chosen):
        pages = view.pages(node)
        num_taken = len(pages)
        parent = node.parent
        must_go = parent is not None and parent.id in gone_below
        if not must_go:
            lanes = layout.lanes(pages)
            num_kept = _num_spare(lanes, surplus)
            surplus -= np.bincount(lanes[:num_kept], minlength=layout.cp_size)
            num_taken -= num_kept
        if num_taken:
            victims.append(Victim(node, num_taken))
        if num_taken or must_go:
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
