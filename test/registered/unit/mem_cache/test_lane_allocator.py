from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglane.mem_cache.lane_allocator import LaneAllocator
from sglane.mem_cache.page_layout import LedgerError, PageLayout, Shortfall

OPS = st.lists(st.tuples(st.sampled_from(["alloc", "free", "issue", "retire"]), st.integers(0, 10**6)), max_size=40)


@settings(max_examples=150)
@given(cp_size=st.integers(1, 4), num_rows=st.integers(2, 9), ops=OPS)
def test_against_a_naive_model(cp_size, num_rows, ops):
    layout = PageLayout(4, cp_size)
    allocator = LaneAllocator(layout, num_rows, record_reusable=True)
    free = set(range(cp_size, num_rows * cp_size))
    taken, tickets, reused = [], [], []  # tickets: (stamp, page)
    issued = retired = 0
    for op, number in ops:
        rng = np.random.default_rng(number)
        if op == "alloc":
            owners = rng.integers(0, cp_size, rng.integers(0, 6)).astype(np.int32)
            wanted = Counter(owners.tolist())
            have = Counter(page % cp_size for page in free)
            pages = allocator.alloc(owners)
            if any(wanted[lane] > have[lane] for lane in wanted):
                assert isinstance(pages, Shortfall)
                assert pages.lanes.tolist() == [max(wanted[lane] - have[lane], 0) for lane in range(cp_size)]
                soon = have + Counter(page % cp_size for _, page in tickets)
                assert pages.pending == all(wanted[lane] <= soon[lane] for lane in wanted)
            else:
                assert (pages % cp_size).tolist() == owners.tolist()
                assert set(pages.tolist()) <= free and len(set(pages.tolist())) == len(pages)
                free -= set(pages.tolist())
                taken += pages.tolist()
        elif op == "free":
            rng.shuffle(taken)
            num_pages = int(rng.integers(0, len(taken) + 1))
            pages, taken = taken[:num_pages], taken[num_pages:]
            allocator.free(np.array(pages, np.int32), issued)
            if issued == retired:
                free |= set(pages)
                reused += pages
            else:
                tickets += [(issued, page) for page in pages]
        elif op == "issue":
            issued += 1
        elif retired < issued:
            retired += 1
            allocator.retire(retired)
            ended = [page for stamp, page in tickets if stamp <= retired]
            tickets = [(stamp, page) for stamp, page in tickets if stamp > retired]
            free |= set(ended)
            reused += ended
        allocator.audit()
        assert set(allocator.free_pages().tolist()) == free
        assert sorted(allocator.ticket_pages().tolist()) == sorted(page for _, page in tickets)
        assert allocator.free_counts().tolist() == [sum(page % cp_size == lane for page in free) for lane in range(cp_size)]
        assert allocator.ticket_counts().tolist() == [sum(page % cp_size == lane for _, page in tickets) for lane in range(cp_size)]
    assert sorted(allocator.drain_reusable().tolist()) == sorted(reused)
    assert not len(allocator.drain_reusable())


def allocator_with(num_pages):
    allocator = LaneAllocator(PageLayout(4, 2), 6)
    return allocator, allocator.alloc(np.zeros(num_pages, np.int32))


@pytest.mark.parametrize("again", ["free", "ticket"])
def test_double_free_raises_and_changes_nothing(again):
    allocator, pages = allocator_with(3)
    allocator.free(pages[:1], 0 if again == "free" else 1)
    with pytest.raises(LedgerError, match=f"{pages[0]} .lane 0.*{again}"):
        allocator.free(pages, 1)
    allocator.audit()
    allocator.free(pages[1:], 1)


def test_a_page_named_twice_in_one_call_raises():
    allocator, pages = allocator_with(2)
    with pytest.raises(LedgerError, match="twice"):
        allocator.free(np.array([pages[0], pages[0]], np.int32), 0)


@pytest.mark.parametrize("page", [0, 1, -1, 12, 4])
def test_sink_foreign_and_free_pages_cannot_be_given_back(page):
    allocator, _ = allocator_with(1)
    with pytest.raises(LedgerError):
        allocator.free(np.array([page], np.int32), 0)


def test_the_sink_is_never_handed_out():
    allocator, pages = allocator_with(5)
    assert 0 not in pages and isinstance(allocator.alloc(np.zeros(1, np.int32)), Shortfall)
