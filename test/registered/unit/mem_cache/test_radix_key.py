import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglane.mem_cache.radix_key import bigram_key, common_prefix, key_view, token_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda tokens: np.array(tokens, np.int32))


@given(TOKENS)
def test_token_key_is_the_ids(tokens):
    key = token_key(tokens)
    assert key.dtype == np.int64 and key.tolist() == tokens.tolist()


@given(TOKENS)
def test_bigram_key_packs_neighbours(tokens):
    key = bigram_key(tokens)
    assert key.dtype == np.int64
    assert [(element >> 32, element & 0xFFFFFFFF) for element in key.tolist()] == list(zip(tokens.tolist(), tokens[1:].tolist()))


@given(length=st.sampled_from([0, 1, 2, 63, 64, 65, 511, 512, 513, 1536, 3000]), other=st.integers(0, 3000), data=st.data())
def test_common_prefix_finds_the_first_difference(length, other, data):
    a = np.arange(length, dtype=np.int64)
    b = np.arange(min(other, 3000), dtype=np.int64)
    shared = min(len(a), len(b))
    expected = shared
    if shared and data.draw(st.booleans()):
        expected = data.draw(st.integers(0, shared - 1))
        b[expected] += 1 << data.draw(st.integers(0, 60))  # one differing byte anywhere in the element
    assert common_prefix(a, b) == common_prefix(b, a) == expected


def test_common_prefix_of_strided_arrays():
    a = np.arange(40, dtype=np.int64)
    assert common_prefix(a[::2], a[::2].copy()) == 20


def test_a_key_of_another_type_is_refused():
    with pytest.raises(ValueError, match="int32"):
        key_view(np.zeros(3, np.int32))
