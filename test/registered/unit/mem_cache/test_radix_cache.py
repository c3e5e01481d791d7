"""The tree by itself, without leases held by requests: hits against a plain list of sequences, and its shape."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_key import BIGRAM_BYTES, TOKEN_BYTES, common_prefix


class TreeWorld:
    """A tree whose pages have contents: a dict page -> the key elements written there."""

    def __init__(self, page_size, cp_size=2, element_bytes=TOKEN_BYTES):
        self.layout = PageLayout(page_size, cp_size)
        self.tree = RadixCache(self.layout, element_bytes)
        self.contents = {}
        self.next_page = cp_size
        self.sequences = []

    def insert(self, key, namespace=""):
        """As a request does that computes everything itself. Returns (pages the tree took, canonical pages, dropped)."""
        size = self.layout.page_size
        pages = np.arange(self.next_page, self.next_page + self.layout.num_pages(len(key)), dtype=np.int32)
        self.next_page += len(pages)
        for index, page in enumerate(pages.tolist()):
            self.contents[page] = key[index * size : (index + 1) * size].tolist()
        hit = self.tree.match(key[:0], namespace)
        insertion = self.tree.insert(hit.node, key, pages)
        self.tree.unpin(hit.node)
        self.sequences.append((namespace, key))
        return insertion

    def match(self, key, namespace=""):
        """Number of tokens; checks that the pages hold exactly these tokens, and ends the leases."""
        hint = self.tree.hint(key, namespace)
        hit = self.tree.match(key, namespace)
        assert hint == hit.num_tokens
        held = [token for page in hit.pages.tolist() for token in self.contents[page]]
        if hit.source is not None:
            assert 0 < hit.source.num_tokens < self.layout.page_size
            held += self.contents[hit.source.page][: hit.source.num_tokens]
            self.tree.unpin(hit.source.node)
        assert held == key[: hit.num_tokens].tolist()
        self.tree.unpin(hit.node)
        return hit.num_tokens

    def nodes(self):
        stack = list(self.tree.roots().values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children


def key_of(tokens):
    return np.array(tokens, np.int32)


# Elements that differ in one byte of any place: a common prefix in bytes often ends inside an element.
ELEMENTS = {TOKEN_BYTES: (0, 1, 1 << 8, 1 << 24), BIGRAM_BYTES: (0, 1, 1 << 24, 1 << 32, 1 << 56)}
DTYPES = {TOKEN_BYTES: np.int32, BIGRAM_BYTES: np.int64}


def keys_of(element_bytes):
    few, many = ELEMENTS[element_bytes][:2], ELEMENTS[element_bytes]
    lists = st.lists(st.sampled_from(few), max_size=14) | st.lists(st.sampled_from(many), max_size=14)
    return lists.map(lambda elements: np.array(elements, DTYPES[element_bytes]))


@settings(max_examples=200)
@given(st.sampled_from([1, 2, 4, 16]), st.sampled_from([TOKEN_BYTES, BIGRAM_BYTES]), st.data())
def test_hits_are_the_longest_common_prefix_with_all_sequences(page_size, element_bytes, data):
    keys = keys_of(element_bytes)
    queries = data.draw(st.lists(keys, max_size=4))
    world = TreeWorld(page_size, element_bytes=element_bytes)
    for namespace, key in data.draw(st.lists(st.tuples(st.sampled_from(["", "b"]), keys), max_size=12)):
        world.insert(key, namespace)
        for query in [*queries, key]:
            expected = max((common_prefix(query, other) for space, other in world.sequences if space == namespace), default=0)
            assert world.match(query, namespace) == expected


@pytest.mark.parametrize("divergence", range(5, 13))
def test_a_page_shared_by_two_prompts_is_counted_once(divergence):
    """Two prompts that part inside a page: cached and evictable pages are distinct pages."""
    world = TreeWorld(4)
    first = key_of(range(10))
    second = np.concatenate((first[:divergence], key_of(range(100, 106))))
    world.insert(first)
    world.insert(second)
    pages = np.concatenate([node.pages for node in world.nodes()])
    assert len(np.unique(pages)) == len(pages) == int(world.tree.cached_counts().sum()) == int(world.tree.evictable_counts().sum())
    assert len(world.tree.evict(world.tree.cached_counts())) == len(pages)
    assert not world.tree.cached_counts().any() and not world.tree.roots()


def test_splits_are_at_page_boundaries_and_only_leaves_end_inside_a_page():
    world = TreeWorld(4)
    for number in range(40):
        rng = np.random.default_rng(number)
        world.insert(rng.integers(0, 2, rng.integers(1, 30)).astype(np.int32))
        for node in world.nodes():
            num_tokens = len(node.key) // TOKEN_BYTES
            assert len(node.pages) == -(-num_tokens // 4)
            assert num_tokens % 4 == 0 or not node.children


def test_a_superseded_tail_is_dropped():
    world = TreeWorld(4)
    world.insert(key_of(range(6)))
    insertion = world.insert(key_of(range(9)))
    assert len(insertion.canonical) == 1 and len(insertion.dropped) == 1 and insertion.num_taken == 2
    assert int(world.tree.cached_counts().sum()) == 3
    shorter = world.insert(key_of(range(7)))  # covered by a full page: nothing is taken
    assert shorter.num_taken == 0 and len(shorter.canonical) == 1


def test_a_leased_tail_is_dropped_when_its_lease_ends():
    world = TreeWorld(4)
    world.insert(key_of(range(6)))
    hit = world.tree.match(key_of(range(6)), "")
    assert hit.source is not None and hit.source.num_tokens == 2
    assert not len(world.insert(key_of(range(9))).dropped)
    assert world.match(key_of(range(9))) == 9  # the fuller page is found beside the leased tail
    assert world.tree.unpin(hit.source.node).tolist() == [hit.source.page]
    world.tree.unpin(hit.node)
    assert world.match(key_of(range(9))) == 9


def test_the_best_partial_match_among_thousands_of_children():
    world = TreeWorld(4)
    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(0, 12, (3000, 4)) << 6, axis=0).astype(np.int32)
    for key in keys:
        world.insert(key)
    for _ in range(300):
        query = (rng.integers(0, 13, 4) << 6).astype(np.int32)
        equal = keys == query
        expected = int(np.cumprod(equal, axis=1).sum(axis=1).max())
        assert world.match(query) == expected


def test_a_leaf_grows_in_place_while_nobody_else_ends_there():
    world = TreeWorld(1)
    for length in range(1, 9):
        world.insert(key_of(range(length)))
    assert sum(node.parent is not None for node in world.nodes()) == 1
    hit = world.tree.match(key_of(range(8)), "")
    world.insert(key_of(range(12)))
    assert len(hit.node.key) == 8 * TOKEN_BYTES  # a lease ends there: the rest is a child
    world.tree.unpin(hit.node)


def test_namespaces_are_apart_and_unused_roots_are_forgotten():
    world = TreeWorld(4)
    world.insert(key_of(range(8)), "a")
    assert world.match(key_of(range(8)), "b") == 0
    assert list(world.tree.roots()) == ["a"]


def test_eviction_is_least_recently_used_and_a_match_counts_as_use():
    world = TreeWorld(4, cp_size=1)
    for start in (0, 100, 200):
        world.insert(key_of(range(start, start + 8)))
    world.match(key_of(range(8)))
    world.tree.hint(key_of(range(100, 108)), "")  # a hint does not
    world.tree.evict(np.array([2]))
    assert [world.match(key_of(range(start, start + 8))) for start in (0, 100, 200)] == [8, 0, 8]


def test_eviction_cuts_a_page_suffix():
    world = TreeWorld(4, cp_size=1)
    world.insert(key_of(range(18)))
    world.tree.evict(np.array([2]))
    assert world.match(key_of(range(18))) == 12


def test_an_impossible_eviction_changes_nothing():
    world = TreeWorld(4, cp_size=2)
    world.insert(key_of(range(16)))
    hit = world.tree.match(key_of(range(8)), "")
    assert world.tree.evict(np.array([3, 0])) is None
    assert world.tree.evictable_counts().sum() == 2 and world.tree.cached_counts().sum() == 4
    world.tree.unpin(hit.node)
    assert world.match(key_of(range(16))) == 16


def test_inserting_what_is_there_counts_as_use():
    world = TreeWorld(4, cp_size=1)
    for start in (0, 100, 0):
        world.insert(key_of(range(start, start + 8)))
    world.tree.evict(np.array([2]))
    assert [world.match(key_of(range(start, start + 8))) for start in (0, 100)] == [8, 0]
