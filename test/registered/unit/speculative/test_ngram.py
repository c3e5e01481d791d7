"""Prompt lookup against a search that tries every place."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglane.speculative.ngram import PromptLookup


def naive(tokens: list[int], min_window: int, max_window: int, num_drafts: int) -> list[int]:
    for window in range(max_window, min_window - 1, -1):
        suffix = tokens[len(tokens) - window:] if window <= len(tokens) else None
        for start in range(len(tokens) - window - 1, -1, -1):
            if tokens[start:start + window] == suffix:
                return tokens[start + window:start + window + num_drafts]
    return []


@given(st.integers(1, 3).flatmap(lambda most: st.lists(st.integers(0, most), max_size=40)), st.integers(1, 5), st.integers(0, 6), st.integers(1, 8))
def test_same_as_a_search_of_every_place(tokens: list[int], min_window: int, more: int, num_drafts: int) -> None:
    found = PromptLookup(min_window, min_window + more, num_drafts).find(np.array(tokens, np.int32))
    assert found.dtype == np.int32
    assert found.tolist() == naive(tokens, min_window, min_window + more, num_drafts)


@pytest.mark.parametrize(("tokens", "drafts"), [
    ([], []),
    ([7], []),
    ([7, 7], [7]),
    ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the most recent one
    ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], [3, 6, 1]),  # the longest one, though older
])
def test_examples(tokens: list[int], drafts: list[int]) -> None:
    assert PromptLookup(1, 12, 3).find(np.array(tokens, np.int32)).tolist() == drafts


def test_tokens_are_not_written() -> None:
    tokens = np.array([1, 2, 1, 2, 1], np.int32)
    tokens.flags.writeable = False
    assert PromptLookup(1, 4, 3).find(tokens).tolist() == [2, 1]
