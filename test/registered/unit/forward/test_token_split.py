import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglane.forward.token_split import Entry, split_tokens, window_rows


@st.composite
def steps(draw):
    page_size, cp_size = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 5))
    entries = []
    for slot in range(draw(st.integers(0, 5))):
        start, n = draw(st.integers(0, 70)), draw(st.integers(0, 40))
        pages = draw(st.lists(st.integers(cp_size, 500), min_size=-(-(start + n) // page_size) + 1, max_size=120))
        entries.append(Entry(slot, start, n, np.array(pages, np.int32)))
    return entries, page_size, cp_size


@given(steps())
def test_every_token_is_computed_by_its_owner_and_comes_back_in_order(step) -> None:
    entries, page_size, cp_size = step
    split = split_tokens(entries, page_size, cp_size)
    tokens = [(e, p) for e, entry in enumerate(entries) for p in range(entry.start, entry.start + entry.num_tokens)]
    assert list(zip(split.entries.tolist(), split.positions.tolist())) == tokens
    padded = np.full((cp_size, split.max_length), -1)
    lengths = []
    for rank in range(cp_size):
        local = split.local(rank)
        lengths.append(len(local))
        assert (np.diff(local) > 0).all()
        padded[rank, :len(local)] = local
        for i in local.tolist():
            e, p = tokens[i]
            page = int(entries[e].pages[p // page_size])
            assert (page % cp_size, page // cp_size, p % page_size) == (rank, split.rows[i], split.offsets[i])
    assert sum(lengths) == len(tokens) and split.max_length == max(lengths)
    assert padded.reshape(-1)[split.inverse].tolist() == list(range(len(tokens)))


@pytest.mark.parametrize(("window", "length", "limit", "want"), [
    (1, 0, 100, 1),   # plain decode
    (8, 1, 100, 7),   # pages 0 and 1 lie in lane 0, page 2 in lane 1
    (4, 6, 100, 2),   # up to the first page of another lane
    (9, 8, 100, 4),   # the last allocated page
    (9, 12, 100, 0),  # stalled: nothing allocated
    (9, 0, 3, 3),     # slot limit
    (9, 3, 3, 0),
])
def test_window_is_clamped(window: int, length: int, limit: int, want: int) -> None:
    pages = np.array([2, 4, 3], np.int32)
    assert window_rows(window, length, pages, 4, 2, limit) == want
