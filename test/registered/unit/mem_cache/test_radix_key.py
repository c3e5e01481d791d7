import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglane.mem_cache.radix_key import BIGRAM_BYTES, TOKEN_BYTES, bigram_key, common_prefix, key_view, token_key

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda tokens: np.array(tokens, np.int32))
both_types = pytest.mark.parametrize("dtype", [np.int32, np.int64])


@given(TOKENS)
def test_token_key_is_the_ids_themselves(tokens):
    key = token_key(tokens)
    assert key.dtype == np.int32 and key.tolist() == tokens.tolist() and (np.shares_memory(key, tokens) or not len(tokens))


@given(TOKENS)
def test_bigram_key_packs_neighbours(tokens):
    key = bigram_key(tokens)
    assert key.dtype == np.int64
    assert [(element >> 32, element & 0xFFFFFFFF) for element in key.tolist()] == list(zip(tokens.tolist(), tokens[1:].tolist()))


@pytest.mark.parametrize("make_key", [token_key, bigram_key])
@pytest.mark.parametrize("tokens", [np.zeros(3, np.int64), np.zeros(3, np.uint32), np.zeros(3), np.zeros((3, 1), np.int32)])
def test_token_ids_of_another_type_are_refused(make_key, tokens):
    with pytest.raises(ValueError, match="is int32"):
        make_key(tokens)


@both_types
@given(
    length=st.sampled_from([0, 1, 2, 63, 64, 65, 128, 511, 512, 513, 1024, 1536, 3000, 40000, 60001]),
    other=st.integers(0, 3000) | st.integers(39000, 61000),
    data=st.data(),
)
def test_common_prefix_finds_the_first_difference(dtype, length, other, data):
    a = np.arange(length, dtype=dtype)
    b = np.arange(other, dtype=dtype)
    expected = shared = min(len(a), len(b))
    if shared and data.draw(st.booleans()):
        expected = data.draw(st.integers(0, shared - 1))
        b[expected] ^= 1 << data.draw(st.integers(0, 30 if dtype == np.int32 else 62))  # one differing byte anywhere in the element
    assert common_prefix(a, b) == common_prefix(b, a) == expected


@both_types
def test_common_prefix_of_strided_and_of_empty_arrays(dtype):
    a = np.arange(40, dtype=dtype)
    assert common_prefix(a[::2], a[::2].copy()) == 20
    assert common_prefix(a[:0], a) == common_prefix(a, a[:0]) == common_prefix(a[:0], a[:0]) == 0


@both_types
def test_common_prefix_of_keys_of_different_types_is_refused(dtype):
    other = np.int32 if dtype == np.int64 else np.int64
    for length in (0, 3):
        with pytest.raises(ValueError, match=f"is {np.dtype(dtype)}"):
            common_prefix(np.zeros(length, dtype), np.zeros(length, other))


def test_a_key_of_another_type_is_refused():
    with pytest.raises(ValueError, match="is int64"):
        key_view(np.zeros(3, np.int32), BIGRAM_BYTES)
    with pytest.raises(ValueError, match="is int32"):
        key_view(np.zeros(0, np.int64), TOKEN_BYTES)
