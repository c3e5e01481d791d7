"""Prompt lookup: what follows a repetition is likely to be what followed the first time."""
import numpy as np


class PromptLookup:
    """A pure function of the tokens so far, so every rank finds the same drafts without a message."""

    def __init__(self, min_window: int, max_window: int, num_drafts: int):
        """Between min_window and max_window of the last tokens must occur earlier; num_drafts: tokens found at most."""
        self._min_window = min_window
        self._max_window = max_window
        self._num_drafts = num_drafts

    def find(self, tokens: np.ndarray) -> np.ndarray:
        """tokens int32 [n]. Returns int32 [m <= num_drafts], a view: what followed the most recent earlier occurrence of the longest suffix that has
        one. An occurrence may overlap the suffix; m is 0 if there is none, and small if it lies close to the end."""
        last = len(tokens) - 1
        # Masks over the whole history instead of lists of candidates: a history of one token repeated costs no more than any other.
        ends = np.ones(max(last, 0), np.bool_)  # [n - 1], whether the suffix compared so far also ends here
        found = -1
        for back in range(min(self._max_window, last)):
            ends = ends[min(back, 1):]  # an occurrence one token longer starts one token earlier
            ends &= tokens[:last - back] == tokens[last - back]  # ends[i]: the suffix of back + 1 tokens starts at i
            if not ends.any():
                break
            if back + 1 >= self._min_window:
                found = last - int(ends[::-1].argmax())  # one past the end of the last occurrence
        return tokens[found:found + self._num_drafts] if found >= 0 else tokens[:0]
