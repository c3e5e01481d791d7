import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglane.mem_cache.owner_policy import decode_owner, prefill_owners
from sglane.mem_cache.page_layout import Demand, PageLayout


@st.composite
def lane_cases(draw):
    cp_size = draw(st.integers(1, 5))

    def counts(most):
        return np.array(draw(st.lists(st.integers(0, most), min_size=cp_size, max_size=cp_size)), np.int64)

    available = counts(12)
    num_pages = draw(st.integers(0, int(available.sum())))
    return PageLayout(draw(st.sampled_from([1, 4, 16])), cp_size), num_pages, counts(40), counts(3), available


def slow_prefill_owners(num_pages, layout, tokens, homes, available):
    """Page by page, as the rule is written: the home, then zigzag pages as long as their lanes can take them, then the rest in turn."""
    if not num_pages:
        return []
    size, left, tokens, homes = layout.cp_size, available.tolist(), tokens.tolist(), homes.tolist()
    owners = [-1] * num_pages

    def give(page, lane):
        owners[page] = lane
        left[lane] -= 1
        tokens[lane] += layout.page_size

    blocks = [page * 2 * size // num_pages for page in range(num_pages)]
    is_short = num_pages < 2 * size
    num_outer = 1 if is_short else sum(block in (0, 2 * size - 1) for block in blocks)
    able = [lane for lane in range(size) if left[lane] >= num_outer] or [lane for lane in range(size) if left[lane]]
    home = min(able, key=lambda lane: (homes[lane], tokens[lane], -left[lane], lane))
    give(num_pages - 1, home)
    for page in [] if is_short else reversed(range(num_pages - 1)):
        lane = (home + (blocks[page] if blocks[page] < size else 2 * size - 1 - blocks[page])) % size
        if left[lane]:
            give(page, lane)
    for page in range(num_pages):
        if owners[page] == -1:
            give(page, min((lane for lane in range(size) if left[lane]), key=lambda lane: (tokens[lane], -left[lane], lane)))
    return owners


@given(lane_cases())
def test_prefill_follows_the_rule_and_always_fits(case):
    layout, num_pages, *counts = case
    before = [each.copy() for each in counts]
    owners = prefill_owners(num_pages, layout, *counts)
    assert owners.dtype == np.int32 and owners.tolist() == slow_prefill_owners(num_pages, layout, *counts)
    assert (np.bincount(owners, minlength=layout.cp_size) <= counts[-1]).all()
    assert all((each == old).all() for each, old in zip(counts, before, strict=True))


def test_zigzag_gives_each_rank_an_early_and_a_late_block():
    none = np.zeros(4, np.int64)
    assert prefill_owners(16, PageLayout(4, 4), none, none, np.full(4, 100)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]


def test_zigzag_begins_and_ends_where_few_requests_grow():
    homes = np.array([2, 1, 0, 1])
    owners = prefill_owners(8, PageLayout(4, 4), np.array([0, 0, 9, 0]), homes, np.full(4, 100)).tolist()
    assert owners == [2, 3, 0, 1, 1, 0, 3, 2]
    assert prefill_owners(8, PageLayout(4, 4), homes, homes, np.array([9, 9, 1, 9]))[-1] == 1  # lane 2 cannot take both of its pages


def test_few_pages_go_to_the_least_loaded_lanes_and_the_last_one_where_few_requests_grow():
    layout, even = PageLayout(4, 3), np.zeros(3, np.int64)
    assert prefill_owners(3, layout, np.array([8, 0, 4]), even, np.array([9, 9, 9])).tolist() == [2, 1, 1]  # level, then lane 2 has more pages
    assert prefill_owners(2, layout, even, even, np.array([5, 9, 9])).tolist() == [2, 1]
    assert prefill_owners(3, layout, np.array([9, 0, 0]), np.array([0, 2, 1]), np.array([5, 8, 9])).tolist() == [2, 1, 0]


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(1, 12), st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_homes_of_equal_requests_stay_level(cp_size, num_pages, arrivals):
    """arrivals: equal requests that come in each step. While they come, lanes differ by one home at most; when they end in the same order, by two."""
    layout, available = PageLayout(4, cp_size), np.full(cp_size, 10_000, np.int64)
    homes = np.zeros(cp_size, np.int64)
    order = []
    for num_arrivals in arrivals:
        tokens = np.zeros(cp_size, np.int64)
        for _ in range(num_arrivals):
            owners = prefill_owners(num_pages, layout, tokens, homes, available)
            np.add.at(tokens, owners, layout.page_size)
            homes[owners[-1]] += 1
            order.append(int(owners[-1]))
        assert homes.max() - homes.min() <= 2
    for home in order:
        homes[home] -= 1
        assert homes.max() - homes.min() <= 2


@given(lane_cases(), st.data())
def test_decode_stays_at_home_while_home_can_give(case, data):
    layout, num_pages, _, homes, available = case
    home = data.draw(st.integers(0, layout.cp_size - 1))
    owners = decode_owner(home, num_pages, homes, available).tolist()
    left, lane = available.tolist(), home
    for owner in owners:
        if not left[lane]:
            lane = min((lane for lane in range(layout.cp_size) if left[lane]), key=lambda lane: (homes[lane], -left[lane], lane))
        assert owner == lane
        left[lane] -= 1
    assert len(owners) == num_pages


@pytest.mark.parametrize("policy", [
    lambda n, a: prefill_owners(n, PageLayout(4, 2), np.zeros(2, np.int64), np.zeros(2, np.int64), a),
    lambda n, a: decode_owner(0, n, np.zeros(2, np.int64), a),
])
def test_more_than_the_total_is_refused(policy):
    with pytest.raises(ValueError, match="do not fit"):
        policy(5, np.array([2, 2]))


def test_demand_fits_lane_by_lane_and_in_total():
    available = np.array([2, 0, 3])
    assert Demand(np.array([1, 0, 1]), 3).fits(available)
    assert not Demand(np.array([1, 0, 1]), 4).fits(available)
    assert not Demand(np.array([0, 1, 0]), 0).fits(available)
    shortfall = Demand(np.array([0, 1, 0]), 7).shortfall(available, pending=True)
    assert (shortfall.lanes.tolist(), shortfall.free, shortfall.pending) == ([0, 1, 0], 2, True)
