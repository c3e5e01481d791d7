"""Plans made by hand for executor tests: random pages, any chunking, no scheduler."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kits.thread_ranks import ThreadGroup, map_pools
from kits.ticket_box import TicketBox
from sglane import environ
from sglane.model_executor.executor import Executor
from sglane.plan.io_struct import SamplingParams
from sglane.plan.step_plan import (
    Backup,
    Continues,
    Extend,
    Load,
    LogprobBlock,
    PoolInit,
    SlotStart,
    StepPlan,
    StepResult,
    TailCopy,
)
from sglane.server_args import ServerArgs

NUM_SLOTS = 8
MAX_PAGES = 256

Run = Callable[[StepPlan], list[StepResult]]


def ints(values: object) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def greedy(max_new_tokens: int = 1 << 20, **fields: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **fields)


class LocalRanks:
    """Executors of all ranks, as threads of this process; a call runs a plan on all of them."""

    def __init__(self, executors: list[Executor], group: ThreadGroup, box: TicketBox):
        self.executors = executors
        self.box = box
        self._group = group

    def __call__(self, plan: StepPlan) -> list[StepResult]:
        if len(self.executors) == 1:
            return [self.executors[0].run(plan)]
        return self._group.run(lambda rank: self.executors[rank].run(plan))

    def close(self, finish: bool = True) -> None:
        """Only a host tier needs it."""
        for executor in self.executors:
            executor.close(finish)


def start_ranks(config: object, models: Sequence[object], page_size: int, num_rows: int = 200, tap: object = None, num_host_rows: int = 0,
                mapped: bool = False, **flags: object) -> LocalRanks:
    """Executors of all ranks, one for each of `models`. mapped: ranks read each other's pools. flags: further ServerArgs."""
    environ.SGLANE_NUM_THREADS = 1
    cp_size = len(models)
    args = ServerArgs(page_size=page_size, cp_size=cp_size, enable_cp_shared_kv=cp_size > 1, enable_hierarchical_cache=num_host_rows > 0,
                      **flags)
    group, box = ThreadGroup(cp_size), TicketBox()
    executors = [Executor(config, model, args, rank, group.groups(rank) if cp_size > 1 else None, tap=tap) for rank, model in enumerate(models)]
    for executor in executors:
        executor.use_reporter(lambda: box)
        executor.init_pool(PoolInit(num_rows, NUM_SLOTS, MAX_PAGES, num_host_rows))
    if mapped:
        map_pools(executors)
    return LocalRanks(executors, group, box)


@dataclass
class Running:
    """One slot."""

    prompt: list[int]
    pages: list[int]
    fed: int
    outputs: list[int] = field(default_factory=list)


@dataclass
class PlanDriver:
    """Keeps the slots of a run; pages are handed out at random, over all lanes."""

    run: Run
    page_size: int
    cp_size: int = 1
    num_rows: int = 200
    seed: int = 0
    num_host_rows: int = 0

    def __post_init__(self) -> None:
        pages = np.arange(self.cp_size, self.num_rows * self.cp_size)
        self.free: list[int] = np.random.default_rng(self.seed).permutation(pages).tolist()
        host_pages = np.arange(self.cp_size, max(1, self.num_host_rows) * self.cp_size)
        self.free_host: list[int] = np.random.default_rng(self.seed + 1).permutation(host_pages).tolist()
        self.copies: dict[int, int] = {}  # device page -> host page with the same rows
        self.slots: dict[int, Running] = {}
        self.blocks: list[LogprobBlock] = []
        self._step = 0
        self._starts: list[SlotStart] = []
        self._copies: list[TailCopy] = []
        self._releases: list[int] = []
        self._poison: list[int] = []
        self._loads: list[Load] = []
        self._backups: list[Backup] = []
        self.num_tickets = 0
        self.num_drafts = 0  # verified so far
        self.ticket_lanes: dict[int, set[int]] = {}  # lanes that have a part

    def start(self, slot: int, prompt: list[int], sampling: SamplingParams, cached: list[int] | None = None, num_cached: int = 0,
              copies: list[TailCopy] | None = None, num_prompt: int | None = None) -> None:
        """The slot starts with the next step. cached: pages that hold the first `num_cached` tokens."""
        history = ints(prompt[:num_cached]) if sampling.needs_history() else b""
        self._starts.append(SlotStart(slot, ints(cached or []), num_cached, len(prompt) if num_prompt is None else num_prompt, sampling, history))
        self._copies += copies or []
        self.slots[slot] = Running(list(prompt), list(cached or []), num_cached)

    def release(self, slot: int, poison: bool = True) -> Running:
        """The slot ends with the next step; its pages are poisoned then, unless they stay cached."""
        running = self.slots.pop(slot)
        self._releases.append(slot)
        if poison:
            self._poison += running.pages
        return running

    def take_page(self, lane: int | None = None) -> int:
        return self._take(self.free, lane)

    def _take(self, free: list[int], lane: int | None) -> int:
        return free.pop(0 if lane is None else next(i for i, page in enumerate(free) if page % self.cp_size == lane))

    def backup(self, pages: list[int], is_written: bool = True) -> int:
        """Copy pages to the host tier in the next step. Returns the ticket."""
        self.num_tickets += 1
        host = [self._take(self.free_host, page % self.cp_size) for page in pages]
        self.copies.update(zip(pages, host))
        self.ticket_lanes[self.num_tickets] = self.lanes(pages)
        self._backups.append(Backup(self.num_tickets, ints(pages), ints(host), is_written))
        return self.num_tickets

    def load(self, host: list[int]) -> tuple[int, list[int]]:
        """Bring host pages back in the next step. Returns the ticket and the device pages."""
        self.num_tickets += 1
        pages = [self.take_page(page % self.cp_size) for page in host]
        self.ticket_lanes[self.num_tickets] = self.lanes(pages)
        self._loads.append(Load(self.num_tickets, ints(host), ints(pages)))
        return self.num_tickets, pages

    def lanes(self, pages: list[int]) -> set[int]:
        return {page % self.cp_size for page in pages}

    def grow(self, slot: int, num_tokens: int) -> list[int]:
        """New pages that cover `num_tokens`."""
        running = self.slots[slot]
        new = [self.take_page() for _ in range(-(-num_tokens // self.page_size) - len(running.pages))]
        running.pages += new
        return new

    def step(self, extends: dict[int, int], continues: list[int] | None = None, logprob_start: int = -1, needs_load: int = 0,
             backup: bool = False, window: int = 1) -> dict[int, list[int]]:
        """extends: slot -> number of prompt tokens. backup: whole pages of the extends go to the host tier while they are computed. window: of the
        continues. Returns the new tokens by slot, none of one that was stalled."""
        self._step += 1
        parts = []
        for slot, n in extends.items():
            running = self.slots[slot]
            begin, end = running.fed, min(running.fed + n, len(running.prompt))
            lookahead = running.prompt[end] if end < len(running.prompt) else -1
            parts.append(Extend(slot, begin, ints(running.prompt[begin:end]), lookahead, ints(self.grow(slot, end)), end == len(running.prompt),
                                logprob_start))
            running.fed = end
            if backup and (pages := [page for page in running.pages[:end // self.page_size] if page not in self.copies]):
                self.backup(pages, is_written=False)
        continues = continues or []
        new = []
        for slot in continues:
            new.append(self.grow(slot, self.slots[slot].fed + window))
        plan = StepPlan(self._step, ints(self._releases), poison=ints(self._poison), starts=self._starts, tail_copies=self._copies,
                        loads=self._loads, backups=self._backups, needs_load=needs_load, extends=parts,
                        continues=Continues(ints(continues), ints([window] * len(continues)), ints([len(p) for p in new]), ints(sum(new, []))))
        self.free += self._poison
        self._releases, self._poison, self._starts, self._copies, self._loads, self._backups = [], [], [], [], [], []
        found = self._collect(self.run(plan))
        for slot in continues:
            self.slots[slot].fed += len(found[slot])
        return found

    def _collect(self, results: list[StepResult]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for result in results:
            assert result.step == self._step
            slots, tokens = np.frombuffer(result.slots, np.int32).tolist(), np.frombuffer(result.tokens, np.int32).tolist()
            counts, drafts = np.frombuffer(result.num_tokens, np.int32).tolist(), np.frombuffer(result.num_drafts, np.int32).tolist()
            assert len(slots) == len(counts) == len(drafts) and sum(counts) == len(tokens)
            for slot, count, num_drafts in zip(slots, counts, drafts):
                assert slot not in found, f"slot {slot} was sampled twice"
                assert count <= num_drafts + 1
                found[slot], tokens = tokens[:count], tokens[count:]
                self.slots[slot].outputs += found[slot]
                self.num_drafts += num_drafts
            self.blocks += result.logprobs
        return found

    def prefill(self, slot: int, chunk: int, logprob_start: int = -1) -> None:
        """Feed the whole prompt in chunks."""
        while self.slots[slot].fed < len(self.slots[slot].prompt):
            self.step({slot: chunk}, logprob_start=logprob_start)

    def generate(self, slot: int, prompt: list[int], num_tokens: int, chunk: int, sampling: SamplingParams | None = None,
                 window: int = 1) -> list[int]:
        """Start, prefill and decode one slot on its own; it stays taken. With windows it may get more tokens."""
        self.start(slot, prompt, sampling or greedy())
        self.prefill(slot, chunk)
        while len(self.slots[slot].outputs) < num_tokens:
            self.step({}, [slot], window=window)
        return self.slots[slot].outputs
