import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglane.mem_cache.owner_policy import decode_owner, prefill_owners
from sglane.mem_cache.page_layout import Demand, PageLayout


@st.composite
def lane_cases(draw):
    cp_size = draw(st.integers(1, 5))
    available = draw(st.lists(st.integers(0, 12), min_size=cp_size, max_size=cp_size))
    tokens = draw(st.lists(st.integers(0, 40), min_size=cp_size, max_size=cp_size))
    num_pages = draw(st.integers(0, sum(available)))
    return PageLayout(draw(st.sampled_from([1, 4, 16])), cp_size), num_pages, np.array(tokens, np.int64), np.array(available, np.int64)


def slow_prefill_owners(num_pages, layout, tokens, available):
    """Page by page, as the rule is written: first the zigzag pages that their lanes can take, then the refused ones in turn."""
    size, left, tokens = layout.cp_size, available.tolist(), tokens.tolist()
    owners = [-1] * num_pages

    def give(page, lane):
        owners[page] = lane
        left[lane] -= 1
        tokens[lane] += layout.page_size

    if num_pages >= 2 * size:
        for page in range(num_pages):
            block = page * 2 * size // num_pages
            lane = block if block < size else 2 * size - 1 - block
            if left[lane]:
                give(page, lane)
    for page in range(num_pages):
        if owners[page] == -1:
            give(page, min((lane for lane in range(size) if left[lane]), key=lambda lane: (tokens[lane], -left[lane], lane)))
    return owners


@given(lane_cases())
def test_prefill_follows_the_rule_and_always_fits(case):
    num_pages, layout, tokens, available = case[1], case[0], case[2], case[3]
    before = tokens.copy(), available.copy()
    owners = prefill_owners(num_pages, layout, tokens, available)
    assert owners.dtype == np.int32 and owners.tolist() == slow_prefill_owners(num_pages, layout, tokens, available)
    assert (np.bincount(owners, minlength=layout.cp_size) <= available).all()
    assert (tokens == before[0]).all() and (available == before[1]).all()


def test_zigzag_gives_each_rank_an_early_and_a_late_block():
    owners = prefill_owners(16, PageLayout(4, 4), np.zeros(4, np.int64), np.full(4, 100))
    assert owners.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 0, 0]


def test_few_pages_go_to_the_least_loaded_lane():
    layout = PageLayout(4, 3)
    assert prefill_owners(3, layout, np.array([8, 0, 4]), np.array([9, 9, 9])).tolist() == [1, 2, 1]  # level, then lane 2 has more pages
    assert prefill_owners(2, layout, np.array([0, 0, 0]), np.array([5, 9, 9])).tolist() == [1, 2]


@given(lane_cases(), st.data())
def test_decode_stays_at_home_while_home_can_give(case, data):
    layout, num_pages, _, available = case
    home = data.draw(st.integers(0, layout.cp_size - 1))
    owners = decode_owner(home, num_pages, available).tolist()
    left, lane = available.tolist(), home
    for owner in owners:
        if not left[lane]:
            lane = left.index(max(left))
        assert owner == lane
        left[lane] -= 1
    assert len(owners) == num_pages


@pytest.mark.parametrize("policy", [lambda n, a: prefill_owners(n, PageLayout(4, 2), np.zeros(2, np.int64), a), lambda n, a: decode_owner(0, n, a)])
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
