"""Keys of the radix tree: integer arrays, compared as bytes.

A key element is a token id (int32, as token ids travel), or a pair of neighbouring token ids packed into one int64 when draft planes exist
(the draft's row i depends on token i + 1). Which of them is decided once for a tree, by the bytes of an element; the tree knows no more.
"""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RadixKey = npt.NDArray[np.int32] | npt.NDArray[np.int64]  # [n] one element for each reusable KV row

TOKEN_BYTES, BIGRAM_BYTES = 4, 8  # of a key element
_DTYPES: dict[int, np.dtype[np.int32] | np.dtype[np.int64]] = {TOKEN_BYTES: np.dtype(np.int32), BIGRAM_BYTES: np.dtype(np.int64)}
_FIRST_BLOCK_BYTES = 4096
_LAST_BLOCK_BYTES = 65536
_SCAN_BYTES = 2048  # below this, one numpy compare is cheaper than further halving


def token_key(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """int32 [n] token ids -> the same array: one element a token. Raises ValueError for another type."""
    check_key(tokens, TOKEN_BYTES)
    return tokens


def bigram_key(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """int32 [n] token ids -> int64 [max(n - 1, 0)] key, element i = (t[i] << 32) | t[i + 1]; ids must not be negative."""
    check_key(tokens, TOKEN_BYTES)
    key = tokens[:-1].astype(np.int64)
    key <<= 32
    key |= tokens[1:]
    return key


@dataclass(frozen=True)
class KeyKind:
    """How the keys of a tree are made."""

    make: Callable[[npt.NDArray[np.int32]], RadixKey]  # int32 [n] token ids -> a key of n - num_ahead elements
    num_ahead: int  # tokens behind its own that a row depends on
    element_bytes: int


TOKEN_KEYS = KeyKind(token_key, 0, TOKEN_BYTES)
BIGRAM_KEYS = KeyKind(bigram_key, 1, BIGRAM_BYTES)


def check_key(key: RadixKey, element_bytes: int) -> None:
    """Raises ValueError unless this is a key [n] whose elements have the type of this size."""
    if key.dtype != _DTYPES[element_bytes] or key.ndim != 1:
        raise ValueError(f"a radix key is {_DTYPES[element_bytes]} [n] here, not {key.dtype} {list(key.shape)}")


def key_view(key: RadixKey, element_bytes: int) -> memoryview:
    """The checked key's bytes without a copy (with one, if the array is not contiguous)."""
    check_key(key, element_bytes)
    return np.ascontiguousarray(key).data.cast("B") if len(key) else memoryview(b"")


def common_prefix(a: RadixKey, b: RadixKey) -> int:
    """Number of leading elements that are equal. Raises ValueError for keys of different types."""
    element_bytes = a.dtype.itemsize
    return common_prefix_bytes(bytes(key_view(a, element_bytes)), key_view(b, element_bytes)) // element_bytes


def common_prefix_bytes(key: bytes, query: memoryview) -> int:
    """Length in bytes of the common prefix of two keys' bytes; it may end inside an element.

    memcmp over blocks of growing size finds the block with the first difference, halving finds the place, one numpy compare the byte.
    """
    low, end = 0, min(len(key), len(query))  # [0, low) is known to be equal
    high = min(_FIRST_BLOCK_BYTES, end)
    while key.startswith(query[low:high], low):
        if high == end:
            return end
        low, high = high, min(3 * high - 2 * low, high + _LAST_BLOCK_BYTES, end)
    while high - low > _SCAN_BYTES:  # the first difference is in [low, high)
        middle = (low + high) // 2
        if key.startswith(query[low:middle], low):
            low = middle
        else:
            high = middle
    ours = np.frombuffer(key, np.uint8, high - low, low)
    theirs = np.frombuffer(query, np.uint8, high - low, low)
    return low + int((ours != theirs).argmax())
