"""A plan's extends and continues as entries with tokens: the same on every rank."""
from dataclasses import dataclass

import numpy as np

from sglane.forward.token_split import Entry, window_rows
from sglane.model_executor.slot_table import SlotError, SlotTable
from sglane.plan.step_plan import Extend, StepPlan


@dataclass(frozen=True)
class Sampled:
    """A token to sample in this step."""

    slot: int
    position: int  # of the sampled token
    last_row: int  # global token whose hidden state decides it
    lane: int  # the rank that samples


@dataclass(frozen=True)
class StepBatch:
    """Extends, then continues."""

    entries: list[Entry]
    num_extends: int
    tokens: np.ndarray  # int64 [T], global order
    firsts: np.ndarray  # int64 [entries] global index of each entry's first token
    samples: list[Sampled]
    stalled: list[tuple[int, int]]  # (slot, lane) of continues without a row


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


def build_batch(plan: StepPlan, table: SlotTable, cp_size: int) -> StepBatch:
    """New pages are in the table already. Raises SlotError if an extend does not start at the slot's length."""
    entries, tokens, samples, stalled = [], [], [], []
    total = 0
    for extend in plan.extends:
        entry, fed = _extend_entry(extend, table, plan.step)
        entries.append(entry)
        tokens.append(fed)
        total += len(fed)
        if extend.sample:
            samples.append(_sampled(entry, total - 1, table.page_size, cp_size))
    slots, windows, _ = continue_fields(plan)
    last = np.empty(len(slots), np.int64)
    num_fed = 0
    for slot, window in zip(slots.tolist(), windows.tolist()):
        length, pages = table.length(slot), table.pages(slot)
        if window_rows(min(window, 1), length, pages, table.page_size, cp_size, table.row_capacity()) == 0:
            stalled.append((slot, int(pages[-1]) % cp_size))
            continue
        entry = Entry(slot, length, 1, pages)
        entries.append(entry)
        last[num_fed] = table.last_token(slot)
        samples.append(_sampled(entry, total + num_fed, table.page_size, cp_size))
        num_fed += 1
    tokens.append(last[:num_fed])
    counts = np.array([entry.num_tokens for entry in entries], np.int64)
    return StepBatch(entries, len(plan.extends), np.concatenate(tokens), np.cumsum(counts) - counts, samples, stalled)


def _extend_entry(extend: Extend, table: SlotTable, step: int) -> tuple[Entry, np.ndarray]:
    tokens = np.frombuffer(extend.tokens, np.int32).astype(np.int64)
    pages = table.pages(extend.slot)
    if extend.start != table.length(extend.slot):
        raise SlotError(f"step {step}: slot {extend.slot} extends at {extend.start}, but has {table.length(extend.slot)} rows")
    if not len(tokens) or extend.start + len(tokens) > len(pages) * table.page_size:
        raise SlotError(f"step {step}: slot {extend.slot} extends by {len(tokens)} tokens at {extend.start} with {len(pages)} pages")
    return Entry(extend.slot, extend.start, len(tokens), pages), tokens


def _sampled(entry: Entry, last_row: int, page_size: int, cp_size: int) -> Sampled:
    end = entry.start + entry.num_tokens
    return Sampled(entry.slot, end, last_row, int(entry.pages[(end - 1) // page_size]) % cp_size)
