"""The planner's one loop body: take messages, retire steps, plan the next step. No sockets, no clocks, no torch."""
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglane.managers.admission import Reserve, WaitingQueue, chunk_rows, must_wait_for_prefix
from sglane.managers.lane_work import LaneWork
from sglane.managers.limits import Limits, StepSummary
from sglane.managers.request import Phase, Request
from sglane.managers.sessions import Sessions
from sglane.managers.speculation import Speculation
from sglane.managers.step_builder import Carry, Entry, IssuedStep, StepBuilder
from sglane.managers.step_results import MergedStep, ResultMerger, to_chunk
from sglane.mem_cache.kv_ledger import Holding, KVLedger
from sglane.mem_cache.page_layout import PageLayout, Shortfall
from sglane.plan.io_struct import FinishReason, GenerateRequest, RequestOutput
from sglane.plan.step_plan import LogprobBlock, StepPlan, StepResult
from sglane.utils import fallback

OUT_OF_KV = "out of KV space: the request needs more pages than the pool can give"


@dataclass
class Totals:
    """Monotonic counts since start."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0
    num_admitted: int = 0  # once more after each retraction
    num_aborted: int = 0
    num_retractions: int = 0
    num_stalls: int = 0  # continues for which the executors had no row


class Scheduler:
    """Decides who runs, on which pages, in which step."""

    def __init__(self, ledger: KVLedger, layout: PageLayout, limits: Limits, num_ranks: int):
        self.ledger = ledger
        self.limits = limits
        self.totals = Totals()
        self.last_step = StepSummary()
        self.sessions = Sessions(ledger)
        self.speculation = Speculation(limits.max_drafts)
        self._layout = layout
        self._waiting = WaitingQueue(limits.policy, limits.max_queued_requests)
        self._reserve = Reserve(limits.conservativeness, layout)
        self._requests: dict[str, Request] = {}  # not finished
        self._running: dict[str, Request] = {}  # admitted and not leaving
        self._leaving: list[Request] = []  # out of the plans, residence kept until the last issued step retires
        self._next_in: tuple[Request, Holding] | None = None  # matched; its pages wait for unretired steps
        self._merger = ResultMerger(num_ranks)
        self._lane_work = LaneWork(layout)
        self._issued: deque[IssuedStep] = deque()
        self._carry = Carry()
        self._outputs: list[RequestOutput] = []
        self._next_step = 1
        self._paused = False

    # --- messages ----------------------------------------------------------------------------------------------------

    def add_request(self, message: GenerateRequest) -> None:
        """A new request. It is refused by an answer with an abort reason, never by an exception."""
        num_prompt_tokens = len(message.input_ids) // 4
        self.totals.num_requests += 1
        self.sessions.used(message.session)
        if num_prompt_tokens >= self.limits.max_request_tokens:
            limit = self.limits.max_request_tokens
            self._refuse(message, 400, f"the prompt has {num_prompt_tokens} tokens, the limit is {limit - 1} (prompt and output: {limit})")
        elif self._waiting.is_full():
            self._refuse(message, 503, f"the queue is full ({len(self._waiting)} requests wait)")
        else:
            assert message.rid not in self._requests, f"rid {message.rid!r} is active: the front must refuse it"
            request = Request(message, self.totals.num_requests, self.limits.max_request_tokens, self.ledger.key_kind, self.limits.max_drafts)
            self._requests[request.rid] = request
            self._waiting.add(request)

    def _refuse(self, message: GenerateRequest, status_code: int, text: str) -> None:
        reason = FinishReason(kind="abort", message=text, status_code=status_code)
        self.totals.num_aborted += 1
        self._outputs.append(RequestOutput(message.rid, b"", len(message.input_ids) // 4, 0, 0, 0, 0, 0, finish=reason))

    def finish(self, rid: str, num_output_tokens: int) -> None:
        """The front cut the text at a stop string."""
        if rid in self._requests:
            self._end(self._requests[rid], FinishReason(kind="stop"), num_output_tokens)

    def abort(self, rid: str) -> None:
        if rid in self._requests:
            self._abort(self._requests[rid], FinishReason(kind="abort", message="aborted"))

    def abort_all(self, message: str, status_code: int) -> None:
        for request in list(self._requests.values()):
            self._abort(request, FinishReason(kind="abort", message=message, status_code=status_code))

    def _abort(self, request: Request, reason: FinishReason) -> None:
        self.totals.num_aborted += 1
        self._end(request, reason)
        self._answer(request, np.empty(0, np.int32), [])

    # --- results -----------------------------------------------------------------------------------------------------

    def add_result(self, result: StepResult) -> None:
        """One rank's result; retires every step that is now complete."""
        self._merger.add(result)
        self._lane_work.waited(result.rank, result.prefix_wait_s)
        for merged in self._merger.complete():
            self._retire(merged)

    def ticket_ended(self, ticket: int, rank: int) -> None:
        """A rank has carried out its part of a load or backup."""
        self.ledger.ticket_ended(ticket, rank)

    def _retire(self, merged: MergedStep) -> None:
        issued = self._issued.popleft()
        assert issued.step == merged.step, f"step {merged.step} retired, expected {issued.step}"
        self.ledger.retired(merged.step)
        for entry in issued.entries:
            self._retire_entry(entry, merged)
        for request in [item for item in self._leaving if item.admitted().last_step <= merged.step]:
            self._leave(request)

    def _retire_entry(self, entry: Entry, merged: MergedStep) -> None:
        request = entry.request
        if entry.samples:
            assert entry.slot in merged.tokens, f"step {merged.step}: no rank sampled slot {entry.slot} (request {request.rid})"
        if entry.is_extend:
            request.retire_rows(entry.num_rows)
        else:
            num_rows, num_drafts = len(merged.tokens[entry.slot]), merged.num_drafts.get(entry.slot, 0)
            if request.retire_window(entry.num_rows, num_rows, num_drafts):
                self.speculation.add(request.cached, num_drafts, num_rows - 1)
            if not num_rows:
                self.totals.num_stalls += request.finish is None
                return
        if entry.is_extend and request.phase in (Phase.PREFILL, Phase.DECODE):
            change = self.ledger.publish(request.admitted().holding, request.publishable_key())
            if change is not None:
                self._carry.change_row(entry.slot, change)
        output_blocks = request.sort_logprobs(merged.logprobs.get(entry.slot, []), entry.is_extend)
        if not entry.samples:
            return
        had_finished = request.finish is not None
        tokens = request.retire_tokens(merged.tokens[entry.slot])
        if had_finished:
            return
        self.totals.num_output_tokens += len(tokens)
        if request.finish is not None:
            self._end_admitted(request)
        self._answer(request, tokens, output_blocks)

    def _answer(self, request: Request, tokens: npt.NDArray[np.int32], blocks: list[LogprobBlock]) -> None:
        self._outputs.append(request.output(tokens, [to_chunk(block, len(tokens)) for block in blocks]))

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _end(self, request: Request, reason: FinishReason, num_kept_outputs: int | None = None) -> None:
        was_waiting = request.phase is Phase.WAITING
        request.finish_with(reason, num_kept_outputs)
        self._lane_work.waits.ended(request.rid)
        if was_waiting and request.residence is None:
            self._waiting.remove(request)
            if self._next_in is not None and self._next_in[0] is request:
                self._cancel_next_in()
        if not was_waiting:
            self._end_admitted(request)
        else:
            del self._requests[request.rid]

    def _end_admitted(self, request: Request) -> None:
        """A request finished while it holds a slot; it may have been retracted before, then it is leaving already."""
        del self._requests[request.rid]
        if request.rid in self._running:
            self._start_leaving(request)

    def _start_leaving(self, request: Request) -> None:
        del self._running[request.rid]
        self._leaving.append(request)
        if not self._issued or request.admitted().last_step < self._issued[0].step:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Publish what is known, give back pages and slot."""
        residence, key = request.admitted(), request.publishable_key()
        self._leaving.remove(request)
        self.ledger.release(residence.holding, key)
        if request.leaves_a_turn():
            self.sessions.keep(request.session, key, request.namespace)
        self._carry.release(residence.slot)
        request.leave()
        if request.phase is Phase.WAITING:
            self._waiting.add(request)

    def _retract(self, request: Request) -> None:
        self._reserve.reset()
        self._send_back(request)

    def _send_back(self, request: Request) -> None:
        request.retract()
        self.totals.num_retractions += 1
        self._start_leaving(request)

    # --- pause -------------------------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """No new steps until `resume`, but for backups; see PauseGeneration. What is under way still retires, and nothing is lost."""
        self._paused = True
        if self._next_in is not None:
            self._cancel_next_in()
        if mode == "abort":
            self.abort_all("aborted: generation was paused", 0)
        elif mode == "retract":
            for request in list(self._running.values()):
                self._send_back(request)

    def resume(self) -> None:
        self._paused = False

    # --- planning ----------------------------------------------------------------------------------------------------

    def next_plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be issued now."""
        if len(self._issued) >= self.limits.max_unretired_steps:
            return None
        num_decoding = sum(request.can_continue() for request in self._running.values())
        builder = StepBuilder(self._next_step, self._layout, self.limits, num_decoding)
        if not self._paused:
            self._plan_requests(builder)
        self._carry.add_backups(self.ledger.take_backups())
        self._carry.add_poison(self.ledger.drain_reusable(), self.ledger.drain_reusable_host())
        if builder.is_empty() and not self._carry.backups:
            return None
        plan = builder.build(self._carry)
        self._carry = Carry()
        self._issued.append(IssuedStep(plan.step, builder.entries))
        self.ledger.issued(plan.step)
        self._next_step += 1
        self._reserve.decay()
        self._lane_work.add(builder.lane_tokens())
        self.totals.num_prompt_tokens += builder.num_extend_tokens
        self.totals.num_cached_tokens += builder.num_cached_tokens
        self.last_step = StepSummary(
            builder.num_starts, builder.num_extend_tokens, builder.num_cached_tokens, builder.num_continues, tuple(builder.started_rids)
        )
        return plan

    def _plan_requests(self, builder: StepBuilder) -> None:
        for request in self._by_seniority():
            if request.rid not in self._running:
                continue  # retracted in favour of an older one
            if request.phase is Phase.PREFILL:
                self._plan_chunk(builder, request)
            elif request.can_continue() and not self.ledger.pending_load(request.admitted().holding):  # published onto pages that are loaded
                self._plan_continue(builder, request)
        self._plan_admissions(builder)

    def _by_seniority(self) -> list[Request]:
        """Who gets pages first; retraction takes from the other end."""
        return sorted(self._running.values(), key=lambda item: (-item.priority, item.admitted().order))

    def _plan_continue(self, builder: StepBuilder, request: Request) -> None:
        """Pages for the most rows that the steps under way and this one can have; where they are short, for one row beyond those under way."""
        residence, window = request.admitted(), request.window(builder.max_drafts)
        wanted = min((start := residence.num_rows_issued) + window, request.num_rows_ever())
        got = self.ledger.extend(residence.holding, wanted, decode=True, lane_tokens=builder.nothing) if wanted > start + 1 else None
        if isinstance(got, Shortfall):
            got, window = None, 1
        pages = self._cover(builder, request, min(start + 1, wanted), decode=True) if got is None else got
        if pages is not None:
            self._lane_work.waits.ended(request.rid)
            builder.continue_(request, window, pages)
            rows, num_pages = residence.num_rows_issued, self._layout.num_pages
            if num_pages(rows) != num_pages(rows + window) and request.can_continue():
                self.ledger.look_ahead(residence.holding, rows + window - 1)

    def _plan_chunk(self, builder: StepBuilder, request: Request) -> None:
        budget = self.limits.chunk_tokens - builder.num_extend_tokens
        if budget <= 0 or not builder.takes_load(self.ledger.pending_load(request.admitted().holding)):
            return
        start = request.admitted().num_rows_issued
        num_rows = chunk_rows(start, request.num_rows_to_prefill(), budget, self._layout.page_size)
        pages = self._cover(builder, request, start + num_rows, decode=False)
        if pages is not None:
            builder.extend(request, num_rows, pages)
            self.ledger.plan_backup(request.admitted().holding, request.key(), start + num_rows)

    def _cover(self, builder: StepBuilder, request: Request, num_rows: int, *, decode: bool) -> npt.NDArray[np.int32] | None:
        """Pages so that `num_rows` rows are covered; takes them from the youngest if need be. None: not in this step."""
        lane_tokens = builder.nothing if decode else builder.lane_tokens()
        while True:
            got = self.ledger.extend(request.admitted().holding, num_rows, decode=decode, lane_tokens=lane_tokens)
            if not isinstance(got, Shortfall):
                self._lane_work.waits.ended(request.rid)
                return got
            if not got.pending and self.sessions.drop_oldest():
                continue
            self._lane_work.waits.refused(request.rid, got)
            if got.pending or self._leaving:
                return None  # pages are on their way
            if self._next_in is not None:
                self._cancel_next_in()
                continue
            youngest = self._by_seniority()[-1]
            if youngest is not request:
                self._retract(youngest)
            elif len(self._running) > 1 or self._issued or self.ledger.has_open_tickets():
                return None  # older ones go first
            else:
                self._abort(request, FinishReason(kind="abort", message=OUT_OF_KV, status_code=503))
                return None

    def _plan_admissions(self, builder: StepBuilder) -> None:
        # A retracted request on its way out needs its pages back before anyone younger comes in.
        if not len(self._waiting) or any(request.phase is Phase.WAITING for request in self._leaving):
            return
        for request in self._waiting.in_order(self._hit_length):
            if builder.num_extend_tokens >= self.limits.chunk_tokens or len(self._running) >= self.limits.max_running_requests:
                return
            if not self.ledger.has_free_slot():
                return
            key = request.key()
            if self.limits.reuse_prefixes:
                hit = self.ledger.hint(key, request.namespace)
                if must_wait_for_prefix(request, key, hit, self._running.values(), self._leaving, self._layout.page_size):
                    continue
            if not self._admit(builder, request):
                return

    def _hit_length(self, request: Request) -> int:
        return self.ledger.hint(request.key(), request.namespace)

    def _admit(self, builder: StepBuilder, request: Request) -> bool:
        """Take in one request with its first chunk. False: it does not fit now."""
        holding = self._matched(request)
        start, page_size = holding.num_cached_tokens, self._layout.page_size
        num_hit_pages = holding.num_cached_device // page_size
        needed = self._layout.num_pages(request.num_known_tokens + 1) - num_hit_pages
        promised = self._reserve.num_pages(iter(self._running.values()))
        if self._running and not self.sessions.make_room(needed + promised):
            self._lane_work.waits.refused(request.rid, None)
            self.ledger.cancel(holding)
            return False
        budget = self.limits.chunk_tokens - builder.num_extend_tokens
        end = start + chunk_rows(start, request.num_known_tokens - start, budget, page_size)
        admission = self.ledger.admit(holding, end, builder.lane_tokens())
        while isinstance(admission, Shortfall) and not admission.pending and self.sessions.drop_oldest():
            admission = self.ledger.admit(holding, end, builder.lane_tokens())
        if isinstance(admission, Shortfall):
            self._lane_work.waits.refused(request.rid, admission)
            if admission.pending:
                self._next_in = (request, holding)  # keeps the lease and what was evicted for it
                return False
            self.ledger.cancel(holding)
            if not self._running and not self._leaving and not self._issued and not self.ledger.has_open_tickets():
                self._abort(request, FinishReason(kind="abort", message=OUT_OF_KV, status_code=503))
            return False
        self._waiting.remove(request)
        self._lane_work.waits.ended(request.rid)
        request.admit(admission.slot, holding, self.totals.num_admitted, admission.num_cached_tokens)
        self.totals.num_admitted += 1
        self._running[request.rid] = request
        builder.start(request, admission)
        self._plan_chunk(builder, request)
        return True

    def _matched(self, request: Request) -> Holding:
        """The request's hit, leased: the one that waited for pages, or a new match."""
        if self._next_in is not None:
            waiting, holding = self._next_in
            if waiting is request:
                self._next_in = None
                return holding
            self._cancel_next_in()  # somebody with a better claim came in between
        max_hit_tokens = request.max_hit_tokens() if self.limits.reuse_prefixes else 0
        return self.ledger.match(request.key(), request.namespace, max_hit_tokens)

    def _cancel_next_in(self) -> None:
        assert self._next_in is not None
        _, holding = self._next_in
        self._next_in = None
        self.ledger.cancel(holding)

    # --- state -------------------------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """No request object anywhere and no step under way."""
        return not self._requests and not self._leaving and not self._issued

    @property
    def oldest_unretired_step(self) -> int | None:
        return self._issued[0].step if self._issued else None

    def laggards(self) -> list[int]:
        """Ranks that owe the oldest unretired step."""
        return self._merger.laggards(self._issued[0].step) if self._issued else []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def flush(self) -> bool:
        """Drop the prefix cache; False while anything is under way. In a pause, requests that wait may go on waiting."""
        if self._running or self._leaving or self._issued or (self._requests and not self._paused) or self.ledger.has_open_tickets():
            return False
        self.sessions.drop_all()
        self.ledger.flush()
        return True

    def load(self) -> dict[str, int | float]:
        """Current load in requests and tokens, as /v1/loads and the log report it."""
        total, page_size = self.ledger.num_tokens_total, self._layout.page_size
        used = total - int(self.ledger.available().sum()) * page_size
        return {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": len(self._waiting),
            "num_waiting_uncached_tokens": self._waiting.num_tokens(),
            "num_used_tokens": used,
            "max_total_num_tokens": total,
            "token_usage": used / total,
            "new_token_ratio": self._reserve.ratio,
        }

    def set_aside(self) -> dict[str, int]:
        """Requests that a pause holds, and those that wait because they had to give their pages back."""
        waiting = [request for request in self._requests.values() if request.phase is Phase.WAITING]
        num_retracted = sum(request.num_retractions > 0 for request in waiting)
        return {"num_paused_reqs": len(self._requests) if self._paused else 0, "num_retracted_reqs": num_retracted}

    def lanes(self) -> dict[str, object]:
        """What is known by lane besides the ledger's pages; see KVLedger.lane_totals and LaneWork."""
        return {**self.ledger.lane_totals(), **self._lane_work.report()}

    def kv_ledger(self) -> dict[str, object]:
        """The ledger as /server_info shows it."""
        return {**self.sessions.beside(self.ledger.snapshot()), "fallbacks": fallback.counts()}
