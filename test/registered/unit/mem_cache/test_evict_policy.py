"""The planner against brute force, on random trees of plain records."""
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglane.mem_cache.evict_policy import TierView, plan_eviction
from sglane.mem_cache.page_layout import Demand, PageLayout
from sglane.mem_cache.page_supply import eviction_shares

VIEW = TierView(lambda record: record.pages, lambda record: len(record.children))


@dataclass
class Record:
    id: int
    last_used: int
    parent: Optional["Record"]
    pages: np.ndarray
    leased: bool = False
    children: list["Record"] = field(default_factory=list)

    @property
    def is_pinned(self):
        return self.parent is None or self.leased or any(child.is_pinned for child in self.children)


@st.composite
def trees(draw):
    cp_size = draw(st.integers(1, 4))
    nodes = [Record(0, 0, None, np.empty(0, np.int32))]
    for number in range(1, draw(st.integers(1, 12))):
        parent = nodes[draw(st.integers(0, len(nodes) - 1))]
        lanes = draw(st.lists(st.integers(0, cp_size - 1), min_size=1, max_size=5))
        pages = np.array([(number * 10 + i) * cp_size + lane for i, lane in enumerate(lanes)], np.int32)
        node = Record(number, draw(st.integers(0, 4)), parent, pages, draw(st.integers(0, 6)) == 0)
        parent.children.append(node)
        nodes.append(node)
    for node in reversed(nodes):  # a parent was used when its children were
        if node.parent is not None:
            node.parent.last_used = max(node.parent.last_used, node.last_used)
    deficit = np.array(draw(st.lists(st.integers(0, 6), min_size=cp_size, max_size=cp_size)), np.int64)
    return PageLayout(4, cp_size), nodes, deficit


def oldest_leaves(nodes):
    leaves = [node for node in nodes if not node.children and not node.is_pinned]
    return iter(sorted(leaves, key=lambda node: (node.last_used, node.id)))


def won(layout, victims):
    return sum((layout.lane_counts(victim.node.pages[-victim.num_pages :]) for victim in victims), layout.no_counts())


def is_legal(victims):
    """Suffixes of unpinned nodes; a node only after all its children went completely."""
    gone = set()
    for victim in victims:
        assert not victim.node.is_pinned and 0 < victim.num_pages <= len(victim.node.pages)
        if not all(child.id in gone for child in victim.node.children):
            return False
        if victim.num_pages == len(victim.node.pages):
            gone.add(victim.node.id)
    return True


@settings(max_examples=300)
@given(trees())
def test_plans_cover_the_deficit_and_contain_nothing_unnecessary(case):
    layout, nodes, deficit = case
    evictable = sum((layout.lane_counts(node.pages) for node in nodes if not node.is_pinned), layout.no_counts())
    victims = plan_eviction(oldest_leaves(nodes), deficit, layout, VIEW)
    if (deficit > evictable).any():
        assert victims is None
        return
    assert victims is not None and is_legal(victims)
    assert len({victim.node.id for victim in victims}) == len(victims)
    assert (won(layout, victims) >= deficit).all()
    for index, victim in enumerate(victims):  # one page less of any victim is illegal or does not cover the deficit
        fewer = [type(victim)(victim.node, victim.num_pages - 1)] if victim.num_pages > 1 else []
        shorter = victims[:index] + fewer + victims[index + 1 :]
        assert not is_legal(shorter) or not (won(layout, shorter) >= deficit).all()


@settings(max_examples=200)
@given(trees())
def test_one_lane_takes_in_strict_lru_order(case):
    """With one lane each page helps, so the plan is the naive one: the oldest leaf's last page, again and again."""
    layout, nodes, deficit = case
    layout = PageLayout(4, 1)
    deficit = np.array([int(deficit.sum())])
    left = {node.id: len(node.pages) for node in nodes}
    expected = dict.fromkeys(left, 0)
    for _ in range(int(deficit[0])):
        open_nodes = [node for node in nodes if not node.is_pinned and left[node.id] and not any(left[child.id] for child in node.children)]
        if not open_nodes:
            assert plan_eviction(oldest_leaves(nodes), deficit, layout, VIEW) is None
            return
        oldest = min(open_nodes, key=lambda node: (node.last_used, node.id))
        left[oldest.id] -= 1
        expected[oldest.id] += 1
    victims = plan_eviction(oldest_leaves(nodes), deficit, layout, VIEW)
    assert {victim.node.id: victim.num_pages for victim in victims} == {node: count for node, count in expected.items() if count}


def test_an_ancestor_with_the_needed_lane_is_reached_through_its_leaves():
    layout = PageLayout(4, 2)
    root = Record(0, 0, None, np.empty(0, np.int32))
    parent = Record(1, 5, root, np.array([3, 4], np.int32))  # lanes 1, 0
    leaves = [Record(2, 3, parent, np.array([6], np.int32)), Record(3, 5, parent, np.array([8], np.int32))]
    stranger = Record(4, 1, root, np.array([10], np.int32))  # oldest, but of no use
    parent.children, root.children = leaves, [parent, stranger]
    victims = plan_eviction(oldest_leaves([root, parent, *leaves, stranger]), np.array([0, 1]), layout, VIEW)
    assert [(victim.node.id, victim.num_pages) for victim in victims] == [(2, 1), (3, 1), (1, 2)]


@given(st.integers(1, 4).flatmap(lambda size: st.tuples(*[st.lists(st.integers(0, 9), min_size=size, max_size=size)] * 4)))
def test_eviction_shares_are_exactly_the_gap(lanes):
    wanted, soon, evictable, fixed = (np.array(counts, np.int64) for counts in lanes)
    wanted = np.minimum(wanted, np.maximum(soon + evictable - fixed, 0))  # what an owner policy can answer
    if (fixed > soon + evictable).any():
        return
    demand = Demand(fixed, int(wanted.sum()))
    shares = eviction_shares(demand, wanted, soon)
    assert (shares <= evictable).all() and (shares >= np.maximum(fixed - soon, 0)).all()
    assert demand.fits(soon + shares)
    gap = max(demand.free - int(np.maximum(soon - fixed, 0).sum()), 0) + int(np.maximum(fixed - soon, 0).sum())
    assert int(shares.sum()) == gap
