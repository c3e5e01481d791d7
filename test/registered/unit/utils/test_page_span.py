import numpy as np
import pytest

from sglane.utils.page_span import check_copy_order, pages_of_slots


def pages(*ids):
    return np.array(ids, np.int32)


def check(sources, targets):
    check_copy_order(sources, targets, cp_size=2, num_source_rows=5, num_target_rows=8)


def test_pairs_of_the_same_lane_are_in_order():
    check(pages(2, 9, 4), pages(14, 3, 2))


@pytest.mark.parametrize(("sources", "targets", "message"), [
    (pages(), pages(), "none"),
    (pages(2, 3), pages(2), "not pairs"),
    (pages(2, 3), pages(2, 4), r"entry 1 \(4\): .*lane"),
    (pages(2, 0), pages(2, 4), r"entry 1 \(0\): the source is a sink"),
    (pages(2, 3), pages(1, 5), r"entry 0 \(1\): the target is a sink"),
    (pages(10, 3), pages(2, 5), "the source is .*outside of 5 x 2 rows"),
    (pages(4, 3), pages(16, 5), "the target is .*outside of 8 x 2 rows"),
    (pages(4, 3, 4), pages(2, 5, 6), "the source is named twice"),
    (pages(2, 4), pages(6, 6), "the target is named twice"),
])
def test_a_fault_is_named(sources, targets, message):
    with pytest.raises(ValueError, match=message):
        check(sources, targets)


def test_whole_pages_of_slots():
    assert pages_of_slots(pages(8, 9, 10, 11, 0, 1, 2, 3), 4).tolist() == [2, 0]


@pytest.mark.parametrize(("slots", "message"), [
    (pages(8, 9, 10), "partial"),
    (pages(9, 10, 11, 12), "not aligned"),
    (pages(0, 1, 2, 3, 8, 9, 11, 10), r"entry 1 \(8\): .*not contiguous"),
])
def test_slots_that_are_not_whole_pages(slots, message):
    with pytest.raises(ValueError, match=message):
        pages_of_slots(slots, 4)
