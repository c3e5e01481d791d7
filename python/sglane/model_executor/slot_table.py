"""What every rank knows of the running requests: page table rows, lengths, last tokens, sampling parameters."""
from typing import Protocol

import numpy as np
from torch import Tensor

from sglane.plan.io_struct import SamplingParams
from sglane.plan.step_plan import RowUpdate, SlotStart


class SlotError(AssertionError):
    """A plan does not fit the slot table; the message names slot and numbers."""


class TokenMask(Protocol):
    """What the grammar of one request allows."""

    def apply(self, logits: Tensor, outputs: np.ndarray) -> None:
        """logits float32 [V], in place: -inf for tokens that may not follow `outputs` int32 [n], the output so far."""
        ...


class TokenHistory:
    """All tokens of one slot by position; kept for requests with penalties or a grammar, or, if drafts are looked up in it, for all."""

    def __init__(self, tokens: np.ndarray):
        self._buffer = np.empty(max(64, 2 * len(tokens)), np.int32)
        self._buffer[:len(tokens)] = tokens
        self._length = len(tokens)

    def append(self, tokens: np.ndarray) -> None:
        needed = self._length + len(tokens)
        if needed > len(self._buffer):
            self._buffer = np.concatenate([self._buffer[:self._length], np.empty(needed, np.int32)])
        self._buffer[self._length:needed] = tokens
        self._length = needed

    def tokens(self) -> np.ndarray:
        """int32 [n], a view."""
        return self._buffer[:self._length]


class Slot:
    """Request data of a taken slot that is not an array element."""

    def __init__(self, start: SlotStart, keeps_history: bool = False):
        self.sampling: SamplingParams = start.sampling
        self.num_prompt_tokens = start.num_prompt_tokens
        self.mask: TokenMask | None = None  # made on the rank that samples, when it samples first
        self.history: TokenHistory | None = None
        if keeps_history or start.sampling.needs_history():
            self.history = TokenHistory(np.frombuffer(start.history, np.int32))

    def constrain(self, mask: TokenMask) -> None:
        """From now on `mask` decides what may be sampled."""
        self.mask = mask


class SlotTable:
    """Replicated on every rank; changed only by plans and by the step exchange."""

    def __init__(self, num_slots: int, max_pages_per_slot: int, page_size: int, page_ids: range, keeps_history: bool = False):
        """page_ids: pages that exist, sink rows not among them. keeps_history: of every slot, not only of those that need it."""
        self.page_size = page_size
        self._keeps_history = keeps_history
        self._page_ids = page_ids
        self._rows = np.zeros((num_slots, max_pages_per_slot), np.int32)
        self._num_pages = np.zeros(num_slots, np.int64)
        self._lengths = np.zeros(num_slots, np.int64)  # valid KV rows
        self._last_tokens = np.full(num_slots, -1, np.int64)  # sampled, not fed yet; -1: none
        self._slots: dict[int, Slot] = {}

    def release(self, slot: int) -> None:
        self._get(slot)
        del self._slots[slot]
        self._num_pages[slot] = 0

    def start(self, start: SlotStart) -> None:
        if start.slot in self._slots:
            raise SlotError(f"slot {start.slot} is started, but it is taken")
        if (self._keeps_history or start.sampling.needs_history()) and len(start.history) != 4 * start.num_cached_tokens:
            raise SlotError(f"slot {start.slot}: {len(start.history) // 4} tokens of history for {start.num_cached_tokens} cached tokens")
        self._slots[start.slot] = Slot(start, self._keeps_history)
        self._num_pages[start.slot] = 0
        self._lengths[start.slot] = start.num_cached_tokens
        self._last_tokens[start.slot] = -1
        self.append_pages(start.slot, np.frombuffer(start.pages, np.int32))

    def append_pages(self, slot: int, pages: np.ndarray) -> None:
        """pages int32 [m]; raises SlotError if the row is full or a page does not exist."""
        self._check(slot, pages)
        first = int(self._num_pages[slot])
        if first + len(pages) > self._rows.shape[1]:
            raise SlotError(f"slot {slot}: {first + len(pages)} pages, but a row has {self._rows.shape[1]}")
        self._rows[slot, first:first + len(pages)] = pages
        self._num_pages[slot] = first + len(pages)

    def update_row(self, update: RowUpdate) -> None:
        pages = np.frombuffer(update.pages, np.int32)
        self._get(update.slot)
        self._check(update.slot, pages)
        if update.first_page + len(pages) > self._num_pages[update.slot]:
            raise SlotError(f"slot {update.slot}: row update up to page {update.first_page + len(pages)} of {self._num_pages[update.slot]}")
        self._rows[update.slot, update.first_page:update.first_page + len(pages)] = pages

    def fed(self, slot: int, tokens: np.ndarray) -> None:
        """An extend has written the rows of `tokens`."""
        self._lengths[slot] += len(tokens)
        history = self._get(slot).history
        if history is not None:
            history.append(tokens)

    def sampled(self, slot: int, tokens: np.ndarray, num_rows: int) -> None:
        """`tokens` int64 [c] follow what is known; the rows of the last known token and of all of them but the last are valid: num_rows = c, or 0
        after an extend, which has counted its rows itself."""
        self._lengths[slot] += num_rows
        self._last_tokens[slot] = tokens[-1]
        history = self._get(slot).history
        if history is not None:
            history.append(tokens)

    def pages(self, slot: int) -> np.ndarray:
        """int32 [num_pages], a view."""
        return self._rows[slot, :self._num_pages[slot]]

    def length(self, slot: int) -> int:
        return int(self._lengths[slot])

    def last_token(self, slot: int) -> int:
        """Raises SlotError if no token has been sampled since the slot started."""
        token = int(self._last_tokens[slot])
        if token < 0:
            raise SlotError(f"slot {slot} continues, but no token was sampled")
        return token

    def get(self, slot: int) -> Slot:
        return self._get(slot)

    def history(self, slot: int) -> np.ndarray:
        """int32 [length + 1], a view: all known tokens, if this table keeps them."""
        history = self._get(slot).history
        assert history is not None, f"slot {slot}: its tokens were not kept"
        return history.tokens()

    def row_capacity(self) -> int:
        """Tokens that a full row covers."""
        return int(self._rows.shape[1]) * self.page_size

    def _check(self, slot: int, pages: np.ndarray) -> None:
        if len(pages) and not (pages.min() >= self._page_ids.start and pages.max() < self._page_ids.stop):
            raise SlotError(f"slot {slot}: pages {pages.tolist()} are not all in {self._page_ids}")

    def _get(self, slot: int) -> Slot:
        if slot not in self._slots:
            raise SlotError(f"slot {slot} is not taken")
        return self._slots[slot]
