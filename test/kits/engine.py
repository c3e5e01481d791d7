"""The scheduler and an executor in one process, without sockets: what a server does, one turn of the loop at a time."""
from collections import deque
from typing import Any, Protocol

import numpy as np

from sglane.managers.limits import Limits
from sglane.managers.scheduler import Scheduler
from sglane.mem_cache.kv_ledger import HostOptions, KVLedger
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.io_struct import GenerateRequest, RequestOutput, SamplingParams
from sglane.plan.step_plan import StepPlan, StepResult, TicketEnded


class RunsPlans(Protocol):
    """All ranks together: a plan in, one result per rank out."""

    def run(self, plan: StepPlan) -> list[StepResult]: ...


class EndsTickets(Protocol):
    """The copies of all ranks."""

    def ended(self) -> list[TicketEnded]:
        """Those that have ended since the last call, which comes once a turn."""
        ...


class Engine:
    """Results come back one turn after their plan, so with overlap two steps are unretired."""

    def __init__(self, executor: RunsPlans, layout: PageLayout, num_rows: int, num_slots: int, chunk: int, overlap: bool = True, **limits: Any):
        """limits: further fields of Limits; bigram_keys: there are draft planes; host: HostOptions of the host tier, copies: its EndsTickets."""
        self.layout = layout
        host: HostOptions | None = limits.pop("host", None)
        self.copies: EndsTickets | None = limits.pop("copies", None)
        self.ledger = KVLedger(layout, num_rows, num_slots, prefix_cache=limits.get("reuse_prefixes", True), record_reusable=True,
                               bigram_keys=limits.pop("bigram_keys", False), host=host)
        self.max_tokens = (num_rows - 1) * layout.cp_size * layout.page_size - layout.page_size
        self.scheduler = Scheduler(self.ledger, layout, Limits(num_slots, self.max_tokens, chunk, 2 if overlap else 1, **limits), layout.cp_size)
        self.executor = executor
        self.outputs: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}
        self.messages: dict[str, list[RequestOutput]] = {}
        self._under_way: deque[list[StepResult]] = deque()

    def add(self, rid: str, prompt: Any, num_new: int, *, sampling: dict[str, Any] | None = None, **fields: Any) -> None:
        """A greedy request; `sampling` are further SamplingParams fields, `fields` further GenerateRequest fields."""
        params = SamplingParams(max_new_tokens=num_new, **{"temperature": 0.0, **(sampling or {})})
        self.scheduler.add_request(GenerateRequest(rid=rid, input_ids=np.array(prompt, np.int32).tobytes(), sampling=params, **fields))
        self.outputs.setdefault(rid, [])

    def turn(self) -> bool:
        """One turn of the loop; True if anything happened."""
        happened = False
        plan = self.scheduler.next_plan()
        while plan is not None:
            happened = True
            self._under_way.append(self.executor.run(plan))
            plan = self.scheduler.next_plan()
        if self._under_way:
            happened = True
            for result in self._under_way.popleft():
                self.scheduler.add_result(result)
        if self.copies is not None:
            happened = happened or self.ledger.has_open_tickets()
            for message in self.copies.ended():
                self.scheduler.ticket_ended(message.ticket, message.rank)
        self.ledger.audit()
        for output in self.scheduler.take_outputs():
            self.outputs[output.rid] += np.frombuffer(output.token_ids, np.int32).tolist()
            self.last[output.rid] = output
            self.messages.setdefault(output.rid, []).append(output)
        return happened

    def run(self, max_turns: int = 5000) -> None:
        """Until idle; then the books must balance."""
        for _ in range(max_turns):
            if not self.turn() and self.scheduler.is_idle():
                self.assert_clean()
                return
        raise AssertionError(f"not idle after {max_turns} turns: {self.scheduler.load()}")

    def assert_clean(self) -> None:
        state: Any = self.scheduler.kv_ledger()
        assert state["leases"] == 0 and state["requests"] == 0, state
        assert state["slots"]["free"] == state["slots"]["total"], state
        for tier in ("device", "host"):
            assert sum(state[tier]["held"]) == 0 and sum(state[tier]["tickets"]) == 0, state
