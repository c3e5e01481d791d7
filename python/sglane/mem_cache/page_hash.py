"""Names of pages by content: what a page's rows depend on is its own key elements and all before them, in one namespace."""
import hashlib

from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_key import RadixKey, key_view

HASH_BYTES = 16


def page_hashes(key: RadixKey, namespace: str, layout: PageLayout) -> list[bytes]:
    """One hash for each whole page of `key`, chained: equal hashes mean equal keys up to the end of the page, in the same namespace, with elements
    of the same type and pages of the same size. Raises ValueError for an array that is no key."""
    view = key_view(key, key.dtype.itemsize)
    page_bytes = layout.page_size * key.dtype.itemsize
    seed = f"{key.dtype.itemsize} {layout.page_size} {namespace}".encode()
    last, hashes = hashlib.blake2b(seed, digest_size=HASH_BYTES).digest(), []
    for start in range(0, len(view) - page_bytes + 1, page_bytes):
        digest = hashlib.blake2b(last, digest_size=HASH_BYTES)
        digest.update(view[start : start + page_bytes])
        last = digest.digest()
        hashes.append(last)
    return hashes
