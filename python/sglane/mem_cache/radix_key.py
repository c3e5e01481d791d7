"""Keys of the radix tree: int64 arrays, compared as bytes.

A key element is a token id, or a pair of neighbouring token ids packed into one number when draft planes exist (the draft's row i depends on
token i + 1). The tree does not know which.
"""
import numpy as np
import numpy.typing as npt

RadixKey = npt.NDArray[np.int64]  # [n] one element for each reusable KV row

ELEMENT_BYTES = 8  # of a key
_FIRST_BLOCK_TOKENS = 512
_SCAN_TOKENS = 64  # below this, one numpy compare is cheaper than further halving


def token_key(tokens: npt.NDArray[np.int32]) -> RadixKey:
    """int32 [n] token ids -> int64 [n] key, one element a token."""
    return tokens.astype(np.int64)


def bigram_key(tokens: npt.NDArray[np.int32]) -> RadixKey:
    """int32 [n] token ids -> int64 [max(n - 1, 0)] key, element i = (t[i] << 32) | t[i + 1]; ids must not be negative."""
    key = tokens[:-1].astype(np.int64)
    key <<= 32
    key |= tokens[1:]
    return key


def key_view(key: RadixKey) -> memoryview:
    """The key's bytes without a copy (with one, if the array is not contiguous)."""
    if key.dtype != np.int64 or key.ndim != 1:
        raise ValueError(f"a radix key is int64 [n], not {key.dtype} {list(key.shape)}")
    return np.ascontiguousarray(key).data.cast("B") if len(key) else memoryview(b"")


def common_prefix(a: RadixKey, b: RadixKey) -> int:
    """Number of leading elements that are equal."""
    return common_prefix_bytes(np.ascontiguousarray(a).tobytes(), key_view(b)) // ELEMENT_BYTES


def common_prefix_bytes(key: bytes, query: memoryview) -> int:
    """Length in bytes, cut to whole elements, of the common prefix of two keys' bytes.

    memcmp over blocks of doubling size finds the block with the first difference, halving finds the place, one numpy compare the element.
    """
    low, end = 0, min(len(key), len(query)) // ELEMENT_BYTES  # elements; [0, low) is known to be equal
    high = min(_FIRST_BLOCK_TOKENS, end)
    while key.startswith(query[low * ELEMENT_BYTES : high * ELEMENT_BYTES], low * ELEMENT_BYTES):
        if high == end:
            return end * ELEMENT_BYTES
        low, high = high, min(3 * high - 2 * low, end)
    while high - low > _SCAN_TOKENS:  # the first difference is in [low, high)
        middle = (low + high) // 2
        if key.startswith(query[low * ELEMENT_BYTES : middle * ELEMENT_BYTES], low * ELEMENT_BYTES):
            low = middle
        else:
            high = middle
    start = low * ELEMENT_BYTES
    ours = np.frombuffer(key, np.int64, high - low, start)
    theirs = np.frombuffer(query, np.int64, high - low, start)
    return (low + int((ours != theirs).argmax())) * ELEMENT_BYTES
