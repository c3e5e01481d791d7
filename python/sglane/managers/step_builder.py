"""Collects the parts of one step while it is planned, and remembers who is in it until it retires."""
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglane.managers.limits import Limits
from sglane.managers.request import Request
from sglane.mem_cache.kv_ledger import Admission, BackupOrder, RowChange
from sglane.mem_cache.page_layout import LaneCounts, PageLayout
from sglane.plan.step_plan import Backup, Continues, Extend, Load, RowUpdate, SlotStart, StepPlan, TailCopy


@dataclass(frozen=True)
class Entry:
    """One request's share of an issued step."""

    request: Request
    slot: int
    num_rows: int  # of a continue: the most it may feed
    is_extend: bool
    samples: bool


@dataclass(frozen=True)
class IssuedStep:
    """Until it retires."""

    step: int
    entries: list[Entry]


@dataclass
class Carry:
    """What waits for the next plan: it can't wait for a step of its own, since an idle engine issues none."""

    releases: list[int] = field(default_factory=list)  # slots
    row_updates: list[RowUpdate] = field(default_factory=list)
    poison: list[npt.NDArray[np.int32]] = field(default_factory=list)  # pages
    poison_host: list[npt.NDArray[np.int32]] = field(default_factory=list)  # host pages
    backups: list[Backup] = field(default_factory=list)

    def release(self, slot: int) -> None:
        self.releases.append(slot)
        self.row_updates = [update for update in self.row_updates if update.slot != slot]

    def change_row(self, slot: int, change: RowChange) -> None:
        self.row_updates.append(RowUpdate(slot, change.first_page, change.pages.astype(np.int32).tobytes()))

    def add_poison(self, pages: npt.NDArray[np.int32], host_pages: npt.NDArray[np.int32]) -> None:
        if len(pages):
            self.poison.append(pages)
        if len(host_pages):
            self.poison_host.append(host_pages)

    def add_backups(self, orders: list[BackupOrder]) -> None:
        for order in orders:
            self.backups.append(Backup(order.ticket, order.device_pages.tobytes(), order.host_pages.tobytes(), order.is_written))


class StepBuilder:
    """One step under construction."""

    def __init__(self, step: int, layout: PageLayout, limits: Limits, num_decoding: int):
        """num_decoding: requests that may decode in this step; with some, it must not wait for loads, with many, their windows get shorter."""
        self.step = step
        self._has_continues = num_decoding > 0
        self.max_drafts = limits.max_drafts
        if limits.max_verify_rows is not None and num_decoding:
            self.max_drafts = max(0, min(limits.max_drafts, limits.max_verify_rows // num_decoding - 1))
        self._keeps_history = limits.keeps_history
        self.entries: list[Entry] = []
        self.num_extend_tokens = 0
        self.num_cached_tokens = 0
        self.started_rids: list[str] = []
        self._layout = layout
        self.nothing = layout.no_counts()
        self._lane_tokens = layout.no_counts()
        self._continue_lanes: list[int] = []  # not in _lane_tokens yet
        self._starts: list[SlotStart] = []
        self._tail_copies: list[TailCopy] = []
        self._loads: list[Load] = []
        self._needs_load = 0
        self._extends: list[Extend] = []
        self._continues: list[tuple[int, int, npt.NDArray[np.int32]]] = []  # slot, window, new pages

    def is_empty(self) -> bool:
        return not self.entries and not self._starts

    @property
    def num_starts(self) -> int:
        return len(self._starts)

    def lane_tokens(self) -> LaneCounts:
        """int64 [cp_size] tokens that each lane computes in this step so far."""
        if self._continue_lanes:
            self._lane_tokens += np.bincount(self._continue_lanes, minlength=self._layout.cp_size)
            self._continue_lanes.clear()
        return self._lane_tokens

    def _count_extend(self, pages: npt.NDArray[np.int32], start: int, end: int) -> None:
        """Positions [start, end) of a row are computed where their pages lie."""
        layout = self._layout
        first, last = start // layout.page_size, (end - 1) // layout.page_size
        self._lane_tokens += layout.lane_counts(pages[first : last + 1]) * layout.page_size
        self._lane_tokens[layout.lane(int(pages[first]))] -= start - first * layout.page_size
        self._lane_tokens[layout.lane(int(pages[last]))] -= (last + 1) * layout.page_size - end

    def start(self, request: Request, admission: Admission) -> None:
        """A request takes its slot. Its first extend follows, in this step or, if it has to wait for a load, in a later one."""
        self.started_rids.append(request.rid)
        history = request.tokens(0, admission.num_cached_tokens).tobytes() if self._keeps_history or request.sampling.needs_history() else b""
        pages = admission.pages.astype(np.int32)
        self._starts.append(
            SlotStart(admission.slot, pages.tobytes(), admission.num_cached_tokens, request.num_prompt_tokens, request.sampling, history)
        )
        if admission.tail_copy is not None:
            self._tail_copies.append(TailCopy(*admission.tail_copy))
        if admission.load is not None:
            order = admission.load
            self._loads.append(Load(order.ticket, order.host_pages.tobytes(), order.device_pages.tobytes()))
        self.num_cached_tokens += admission.num_cached_tokens

    def takes_load(self, ticket: int) -> bool:
        """Whether an extend that reads what this load brings may be in the step, which then waits for it layer by layer. 0: no load."""
        if ticket and self._has_continues:
            return False
        self._needs_load = max(self._needs_load, ticket)
        return True

    def extend(self, request: Request, num_rows: int, new_pages: npt.NDArray[np.int32]) -> None:
        """Feed the next `num_rows` known tokens."""
        residence = request.admitted()
        start = residence.num_rows_issued
        end = start + num_rows
        samples = request.issue_extend(self.step, num_rows)
        lookahead = -1 if samples else int(request.tokens(end, end + 1)[0])
        self._extends.append(
            Extend(residence.slot, start, request.tokens(start, end).tobytes(), lookahead, new_pages.tobytes(), samples, request.logprob_start)
        )
        self.entries.append(Entry(request, residence.slot, num_rows, True, samples))
        self._count_extend(residence.holding.pages, start, end)
        self.num_extend_tokens += num_rows

    def continue_(self, request: Request, window: int, new_pages: npt.NDArray[np.int32]) -> None:
        """Feed the slot's own last token, and up to window - 1 drafts."""
        residence = request.admitted()
        request.issue_continue(self.step, window)
        self._continues.append((residence.slot, window, new_pages))
        self.entries.append(Entry(request, residence.slot, window, False, True))
        self._continue_lanes += [residence.holding.home_lane] * window

    @property
    def num_continues(self) -> int:
        return len(self._continues)

    def build(self, carry: Carry) -> StepPlan:
        """The finished plan; takes everything that waited."""
        continues = Continues()
        if self._continues:
            slots, windows, parts = zip(*self._continues)
            counts = np.array([len(part) for part in parts], dtype=np.int32)
            continues = Continues(np.array(slots, np.int32).tobytes(), np.array(windows, np.int32).tobytes(), counts.tobytes(),
                                  np.concatenate(parts).astype(np.int32).tobytes())
        return StepPlan(
            step=self.step,
            releases=np.array(carry.releases, dtype=np.int32).tobytes(),
            row_updates=carry.row_updates,
            poison=_joined(carry.poison),
            poison_host=_joined(carry.poison_host),
            starts=self._starts,
            tail_copies=self._tail_copies,
            loads=self._loads,
            backups=carry.backups,
            needs_load=self._needs_load,
            extends=self._extends,
            continues=continues,
        )


def _joined(parts: list[npt.NDArray[np.int32]]) -> bytes:
    """int32, one after another."""
    return np.concatenate(parts).astype(np.int32).tobytes() if parts else b""
