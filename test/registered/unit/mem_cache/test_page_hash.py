import numpy as np
import pytest

from sglane.mem_cache.page_hash import HASH_BYTES, page_hashes
from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_key import bigram_key

KEY = np.arange(21, dtype=np.int32)


def test_each_whole_page_has_a_hash_and_a_prefix_has_the_same_ones():
    hashes = page_hashes(KEY, "", PageLayout(4, 2))
    assert len(hashes) == len(set(hashes)) == 5 and all(len(name) == HASH_BYTES for name in hashes)
    for length in range(len(KEY)):
        assert page_hashes(KEY[:length], "", PageLayout(4, 2)) == hashes[: length // 4]


def test_a_hash_depends_on_all_tokens_before_it():
    changed = KEY.copy()
    changed[5] = 99
    same = [a == b for a, b in zip(page_hashes(KEY, "", PageLayout(4, 1)), page_hashes(changed, "", PageLayout(4, 1)))]
    assert same == [True, False, False, False, False]


def test_namespace_page_size_and_element_type_are_part_of_it_and_lanes_are_not():
    first = page_hashes(KEY, "", PageLayout(4, 1))[0]
    assert page_hashes(KEY, "", PageLayout(4, 8))[0] == first
    others = [page_hashes(KEY, "a", PageLayout(4, 1))[0], page_hashes(KEY[:4].astype(np.int64), "", PageLayout(4, 1))[0],
              page_hashes(bigram_key(KEY), "", PageLayout(4, 1))[0], page_hashes(KEY, "", PageLayout(2, 1))[0]]
    assert len({first, *others}) == 5


def test_what_is_no_key_is_refused():
    with pytest.raises(ValueError):
        page_hashes(KEY.reshape(3, 7), "", PageLayout(4, 1))
