"""A plan's extends and continues as entries with tokens: the same on every rank, but for the drafts, which their own rank knows."""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglane.forward.token_split import Entry, window_rows
from sglane.forward.window import Window
from sglane.model_executor.slot_table import SlotError, SlotTable
from sglane.plan.step_plan import Extend, StepPlan

#: In place of a token that this rank does not know.
UNKNOWN = -1


@dataclass(frozen=True)
class StepBatch:
    """Extends, then continues."""

    entries: list[Entry]
    num_extends: int
    tokens: np.ndarray  # int64 [T], global order; drafts are filled in before the forward, on the rank that computes them
    firsts: np.ndarray  # int64 [entries] global index of each entry's first token
    lookaheads: np.ndarray  # int64 [extends] the token after each extend's last one, UNKNOWN if it is sampled in this step
    windows: list[Window]  # in global order
    stalled: list[tuple[int, int]]  # (slot, lane) of continues without a row

    @property
    def num_extend_rows(self) -> int:
        """Tokens of all extends; they come first."""
        return sum(entry.num_tokens for entry in self.entries[:self.num_extends])

    def following(self, runs: list[tuple[Window, np.ndarray]]) -> np.ndarray:
        """int64 [T]: the token after each row. runs: windows with their new tokens int64 [c]; after rows that were not accepted comes anything."""
        tokens = np.append(self.tokens[1:], UNKNOWN)
        ends = self.firsts[:self.num_extends] + np.array([entry.num_tokens for entry in self.entries[:self.num_extends]], np.int64)
        tokens[ends - 1] = self.lookaheads
        for window, run in runs:
            tokens[window.first_row:window.first_row + len(run)] = run
            tokens[window.first_row + len(run):window.first_row + window.num_rows] = run[-1]
        return tokens


def continue_fields(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Slots, windows and new pages of each continue."""
    continues = plan.continues
    slots = np.frombuffer(continues.slots, np.int32)
    counts = np.frombuffer(continues.num_new_pages, np.int32)
    pages = np.frombuffer(continues.new_pages, np.int32)
    if len(counts) != len(slots) or int(counts.sum()) != len(pages):
        raise SlotError(f"step {plan.step}: {len(slots)} continues with {len(counts)} page counts for {len(pages)} pages")
    if not len(pages):
        return slots, np.frombuffer(continues.windows, np.int32), [pages] * len(slots)
    return slots, np.frombuffer(continues.windows, np.int32), np.split(pages, np.cumsum(counts)[:-1])


def build_batch(plan: StepPlan, table: SlotTable, cp_size: int, num_rows: Callable[[int, int], int]) -> StepBatch:
    """New pages are in the table already. num_rows(slot, most): rows that a continue feeds, 1 .. most, the same on every rank. Raises SlotError if an
    extend does not start at the slot's length."""
    entries, tokens, windows, stalled = [], [], [], []
    total = 0
    for extend in plan.extends:
        entry, fed = _extend_entry(extend, table, plan.step)
        entries.append(entry)
        tokens.append(fed)
        total += len(fed)
        if extend.sample:
            windows.append(_window(entry, total - 1, 1, table.page_size, cp_size))
    slots, most, _ = continue_fields(plan)
    fed = np.full(int(most.sum()), UNKNOWN, np.int64)
    first = total
    for slot, window in zip(slots.tolist(), most.tolist()):
        length, pages = table.length(slot), table.pages(slot)
        rows = window_rows(window, length, pages, table.page_size, cp_size, table.row_capacity())
        if rows == 0:
            stalled.append((slot, int(pages[-1]) % cp_size))
            continue
        if rows > 1:
            rows = num_rows(slot, rows)
        entry = Entry(slot, length, rows, pages)
        entries.append(entry)
        fed[total - first] = table.last_token(slot)
        windows.append(_window(entry, total, rows, table.page_size, cp_size))
        total += rows
    tokens.append(fed[:total - first])
    counts = np.array([entry.num_tokens for entry in entries], np.int64)
    lookaheads = np.array([extend.lookahead for extend in plan.extends], np.int64)
    return StepBatch(entries, len(plan.extends), np.concatenate(tokens), np.cumsum(counts) - counts, lookaheads, windows, stalled)


def _extend_entry(extend: Extend, table: SlotTable, step: int) -> tuple[Entry, np.ndarray]:
    tokens = np.frombuffer(extend.tokens, np.int32).astype(np.int64)
    pages = table.pages(extend.slot)
    if extend.start != table.length(extend.slot):
        raise SlotError(f"step {step}: slot {extend.slot} extends at {extend.start}, but has {table.length(extend.slot)} rows")
    if not len(tokens) or extend.start + len(tokens) > len(pages) * table.page_size:
        raise SlotError(f"step {step}: slot {extend.slot} extends by {len(tokens)} tokens at {extend.start} with {len(pages)} pages")
    return Entry(extend.slot, extend.start, len(tokens), pages), tokens


def _window(entry: Entry, first_row: int, num_rows: int, page_size: int, cp_size: int) -> Window:
    """The last `num_rows` rows of an entry."""
    start = entry.start + entry.num_tokens - num_rows
    return Window(entry.slot, start, first_row, num_rows, entry.pages, int(entry.pages[start // page_size]) % cp_size)
