"""The planner process around the scheduler: sockets, start-up, heartbeat, watchdog, flush, shutdown."""
import logging
import time
from dataclasses import asdict, dataclass

import msgspec
import zmq

from sglane import environ
from sglane.managers.host_work import HostWork
from sglane.managers.limits import Limits
from sglane.managers.reporter import Reporter
from sglane.managers.scheduler import Scheduler
from sglane.mem_cache.kv_ledger import HostOptions, KVLedger
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.io_struct import (
    AbortRequest,
    CloseSession,
    ContinueGeneration,
    Fatal,
    FinishRequest,
    FlushCache,
    FromPlanner,
    GenerateRequest,
    GetState,
    Heartbeat,
    OpenSession,
    PauseGeneration,
    PlannerReady,
    PrepareGrammar,
    Reply,
    SetLogLevel,
    Shutdown,
    StartProfile,
    StepOutputs,
    StopProfile,
    ToPlanner,
)
from sglane.plan.step_plan import (
    ExecutorError,
    ExecutorReady,
    FallbackCounts,
    FromExecutor,
    GrammarReady,
    PoolInit,
    PoolReady,
    ProfileDone,
    Progress,
    StepResult,
    Stop,
    TicketEnded,
    ToExecutor,
)
from sglane.server_args import ConfigError, ProcessSpec, ServerArgs
from sglane.utils import fallback
from sglane.utils.ipc import Receiver, Sender

logger = logging.getLogger(__name__)

#: Most prompt tokens in one step with --chunked-prefill-size -1.
UNCHUNKED_STEP_TOKENS = 1 << 30
#: Longest sleep of the loop, so that heartbeats, timeouts and the watchdog run.
MAX_WAIT_MS = 200
HEARTBEAT_S = 1.0
DEFAULT_RUNNING_REQUESTS_CPU = 64
DEFAULT_RUNNING_REQUESTS_GPU = 256
#: More rows in a step cost a CPU more time than drafts save. On a GPU nothing was measured: no limit.
DEFAULT_VERIFY_ROWS_CPU = 48
#: --hicache-write-policy -> how often a page must have been hit before it is backed up; 1: when it is computed.
MIN_HITS = {"write_through": 1, "write_through_selective": 2}
#: Pages a lone request must leave free: the source of its tail copy stays leased until the copy has run.
SPARE_PAGES = 1


class EngineFailure(RuntimeError):
    """A rank failed, hung or disagrees; the server must end."""


@dataclass(frozen=True)
class Sizes:
    """What all ranks agreed on at start-up."""

    num_rows: int  # per lane, sink row included
    num_host_rows: int  # the same of the host tier; 0: none
    num_slots: int
    context_length: int
    max_request_tokens: int


def agree_on_sizes(args: ServerArgs, layout: PageLayout, ready: list[ExecutorReady]) -> Sizes:
    """The pool every rank can hold. Raises ConfigError when the flags don't fit the memory."""
    max_rows = min(rank.max_rows for rank in ready)
    num_rows = max_rows
    if args.max_total_tokens is not None:
        num_pages_per_lane = -(-layout.num_pages(args.max_total_tokens) // layout.cp_size)
        num_rows = num_pages_per_lane + 1
        if num_rows > max_rows:
            room = (max_rows - 1) * layout.cp_size * layout.page_size
            raise ConfigError(f"--max-total-tokens {args.max_total_tokens} does not fit: the memory budget holds {room} tokens")
    num_pages = (num_rows - 1) * layout.cp_size
    if num_pages <= SPARE_PAGES + 1:
        raise ConfigError(f"the KV pool has only {num_pages} pages of {layout.page_size} tokens: raise --max-total-tokens or lower --page-size")
    context_length = min(rank.context_length for rank in ready)
    max_request_tokens = min(context_length, (num_pages - SPARE_PAGES) * layout.page_size)
    if max_request_tokens < context_length:
        logger.warning("requests are limited to %d tokens by the KV pool; the context length is %d", max_request_tokens, context_length)
    default_slots = DEFAULT_RUNNING_REQUESTS_CPU if ready[0].device_name == "cpu" else DEFAULT_RUNNING_REQUESTS_GPU
    num_slots = args.max_running_requests or default_slots
    return Sizes(num_rows, agree_on_host_rows(args, num_rows, ready), num_slots, context_length, max_request_tokens)


def agree_on_host_rows(args: ServerArgs, num_rows: int, ready: list[ExecutorReady]) -> int:
    """Rows of the host pool of a lane, sink row included; 0 without a host tier. Raises ConfigError when no page fits."""
    if not args.enable_hierarchical_cache:
        return 0
    num_host_rows = most = min(rank.max_host_rows for rank in ready)
    if args.hicache_size is None:
        wanted = int(args.hicache_ratio * (num_rows - 1)) + 1
        num_host_rows = min(wanted, most)
        if num_host_rows < wanted:
            logger.warning("--hicache-ratio %g asks for %d host pages per rank, but memory has room for %d", args.hicache_ratio, wanted - 1, most - 1)
    if num_host_rows < 2:
        raise ConfigError(f"the host tier would have no page of {ready[0].num_bytes_per_page} bytes: raise --hicache-size or --hicache-ratio, "
                          "or lower --page-size")
    return num_host_rows


def check_likeness(ready: list[ExecutorReady]) -> None:
    """Raises EngineFailure when ranks, in order, hold different kinds of pages: their hosts have other models or types."""
    first = ready[0]
    for rank in ready[1:]:
        for what, ours, theirs in (("planes", first.planes, rank.planes), ("bytes per page", first.num_bytes_per_page, rank.num_bytes_per_page),
                                   ("vocabulary size", first.vocab_size, rank.vocab_size)):
            if ours != theirs:
                raise EngineFailure(f"ranks 0 and {rank.rank} differ in {what}: {ours} and {theirs}")


def host_options(args: ServerArgs, num_host_rows: int) -> HostOptions | None:
    """What the ledger is told of the host tier."""
    return HostOptions(num_host_rows, MIN_HITS[args.hicache_write_policy]) if num_host_rows else None


class Planner:
    """Owns the sockets and the loop; decisions are the scheduler's."""

    def __init__(self, spec: ProcessSpec):
        self._args = spec.server_args
        self._layout = PageLayout(self._args.page_size, self._args.cp_size)
        self._context = context = zmq.Context()
        self._from_front = Receiver(context, spec.endpoints.to_planner, ToPlanner)
        self._from_executors = Receiver(context, spec.endpoints.from_executors, FromExecutor, spec.endpoints.from_other_nodes)
        self._to_front = Sender(context, spec.endpoints.to_front)
        self._to_executors: list[Sender] = []  # by rank, once they have told their addresses
        self._poller = zmq.Poller()
        self._poller.register(self._from_front.socket, zmq.POLLIN)
        self._poller.register(self._from_executors.socket, zmq.POLLIN)
        self._last_progress_s = [time.monotonic()] * self._args.cp_size
        self._last_heartbeat_s = 0.0
        self._flushes: list[tuple[FlushCache, float]] = []
        self._drain_deadline_s: float | None = None
        self._pauses: list[int] = []  # request_ids of PauseGeneration that wait for the steps under way
        self._asked: dict[int, dict[int, str]] = {}  # request_id of a question to all ranks -> rank -> error, empty if it went well

    # --- start-up ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait for all ranks, size the pools, announce readiness."""
        ready = sorted(self._collect(ExecutorReady), key=lambda rank: rank.rank)
        check_likeness(ready)
        self._to_executors = [Sender(self._context, rank.address) for rank in ready]
        self.sizes = agree_on_sizes(self._args, self._layout, ready)
        max_pages_per_slot = self._layout.num_pages(self.sizes.max_request_tokens)
        self._broadcast(PoolInit(self.sizes.num_rows, self.sizes.num_slots, max_pages_per_slot, self.sizes.num_host_rows))
        self._collect(PoolReady)
        args = self._args
        ledger = KVLedger(
            self._layout, self.sizes.num_rows, self.sizes.num_slots, prefix_cache=not args.disable_radix_cache, record_reusable=environ.SGLANE_POISON,
            bigram_keys=any(plane.name.startswith("draft.") for plane in ready[0].planes), host=host_options(args, self.sizes.num_host_rows),
        )
        limits = Limits(
            max_running_requests=self.sizes.num_slots,
            max_request_tokens=self.sizes.max_request_tokens,
            chunk_tokens=UNCHUNKED_STEP_TOKENS if args.chunked_prefill_size == -1 else args.chunked_prefill_size,
            max_unretired_steps=1 if args.disable_overlap_schedule else 2,
            max_queued_requests=args.max_queued_requests,
            policy=args.schedule_policy,
            conservativeness=args.schedule_conservativeness,
            reuse_prefixes=not args.disable_radix_cache,
            max_drafts=args.num_drafts(),
            max_verify_rows=args.speculative_max_rows or (DEFAULT_VERIFY_ROWS_CPU if ready[0].device_name == "cpu" else None),
            keeps_history=args.looks_up_prompts(),
        )
        self.scheduler = Scheduler(ledger, self._layout, limits, args.cp_size)
        self._reporter = Reporter(self.scheduler, args.decode_log_interval)
        self._host_work = HostWork(ready[0].num_bytes_per_page if self.sizes.num_host_rows else 0)
        self._memory = {
            "devices": [rank.device_name for rank in ready],
            "weight_bytes": [rank.weight_bytes for rank in ready],
            "kvcache_bytes": [rank.num_bytes_per_page * self.sizes.num_rows for rank in ready],
            "host_kvcache_bytes": [rank.num_bytes_per_page * self.sizes.num_host_rows for rank in ready],
            "token_capacity": ledger.num_tokens_total,
            "planes": [msgspec.to_builtins(plane) for plane in ready[0].planes],
        }
        logger.info(
            "max_total_num_tokens=%d, page_size=%d, cp_size=%d, max_running_requests=%d, context_len=%d, max_request_tokens=%d",
            ledger.num_tokens_total, args.page_size, args.cp_size, self.sizes.num_slots, self.sizes.context_length, self.sizes.max_request_tokens,
        )
        info = {"max_total_num_tokens": ledger.num_tokens_total, "max_running_requests": self.sizes.num_slots, "memory_usage": self._memory}
        self._send_front(PlannerReady(ledger.num_tokens_total, self.sizes.max_request_tokens, self.sizes.context_length, args.page_size, info))

    def _collect(self, kind: type) -> list:  # type: ignore[type-arg]
        """One message of `kind` from every rank; heartbeats go on, since loading weights takes long."""
        messages: list[object] = []
        while len(messages) < self._args.cp_size:
            if self._from_executors.poll(MAX_WAIT_MS):
                message = self._from_executors.recv()
                if isinstance(message, ExecutorError):
                    raise EngineFailure(f"rank {message.rank}: {message.message}")
                assert isinstance(message, kind), f"expected {kind.__name__} while starting, got {message!r}"
                messages.append(message)
            self._beat(time.monotonic())
        return messages

    # --- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to stop. Raises EngineFailure when the engine cannot go on."""
        self._last_progress_s = [time.monotonic()] * self._args.cp_size  # loading weights took its time
        while not self._is_drained():
            self._receive()
            plan = self.scheduler.next_plan()
            while plan is not None:
                self._broadcast(plan)
                self._reporter.step_issued(plan)
                plan = self.scheduler.next_plan()
            self._send_outputs()
            self._answer_flushes()
            if self._pauses and self.scheduler.oldest_unretired_step is None:
                self._answer_pauses()
            self._keep_time()
        self._send_outputs()
        self._broadcast(Stop())

    def _send_outputs(self) -> None:
        outputs = self.scheduler.take_outputs()
        if outputs:
            self._reporter.outputs_taken(outputs)
            self._send_front(StepOutputs(outputs, self._reporter.queue_times.take_new()))

    def _receive(self) -> None:
        """Wait for a message or the next tick, then take all messages that are there."""
        self._poller.poll(MAX_WAIT_MS)
        for message in self._from_executors.drain():
            self._on_executor(message)
        for message in self._from_front.drain():
            self._on_front(message)

    def _on_executor(self, message: object) -> None:
        if isinstance(message, StepResult):
            self._last_progress_s[message.rank] = time.monotonic()
            self.scheduler.add_result(message)
            if environ.SGLANE_DEBUG_LEDGER:
                self.scheduler.ledger.audit()
        elif isinstance(message, TicketEnded):
            self._host_work.ended("load" if message.is_load else "backup", message.num_bytes, message.duration_s)
            self._reporter.ticket_ended(message)
            self.scheduler.ticket_ended(message.ticket, message.rank)
        elif isinstance(message, Progress):
            self._last_progress_s[message.rank] = time.monotonic()
        elif isinstance(message, FallbackCounts):
            fallback.report(message.rank, message.counts)
        elif isinstance(message, GrammarReady):
            self._on_answer(message.request_id, message.rank, "")
        elif isinstance(message, ProfileDone):
            self._on_answer(message.request_id, message.rank, message.error)
        elif isinstance(message, ExecutorError):
            raise EngineFailure(f"rank {message.rank}: {message.message}")
        else:
            raise EngineFailure(f"unexpected message from an executor: {message!r}")

    def _on_front(self, message: object) -> None:
        if isinstance(message, GenerateRequest):
            self._reporter.request_arrived(message.rid)
            self.scheduler.add_request(message)
        elif isinstance(message, FinishRequest):
            self.scheduler.finish(message.rid, message.num_output_tokens)
        elif isinstance(message, AbortRequest):
            if message.abort_all:
                self.scheduler.abort_all("aborted", 0)
            else:
                self.scheduler.abort(message.rid)
        elif isinstance(message, OpenSession):
            self.scheduler.sessions.open(message.session)
        elif isinstance(message, CloseSession):
            self.scheduler.sessions.close(message.session)
        elif isinstance(message, FlushCache):
            self._flushes.append((message, time.monotonic() + message.timeout_s))
        elif isinstance(message, GetState):
            self._send_front(Reply(message.request_id, True, self._state()))
        elif isinstance(message, PrepareGrammar | StartProfile | StopProfile):
            self._asked[message.request_id] = {}
            self._broadcast(message)
        elif isinstance(message, PauseGeneration):
            self.scheduler.pause(message.mode)
            self._pauses.append(message.request_id)
        elif isinstance(message, ContinueGeneration):
            self.scheduler.resume()
            self._answer_pauses()
            self._send_front(Reply(message.request_id, True, {}))
        elif isinstance(message, SetLogLevel):
            logging.getLogger().setLevel(message.level.upper())
            self._broadcast(message)
        elif isinstance(message, Shutdown):
            self._drain_deadline_s = time.monotonic() + message.drain_s

    def _on_answer(self, request_id: int, rank: int, error: str) -> None:
        """The front waits until every rank has answered."""
        answers = self._asked[request_id]
        answers[rank] = error
        if len(answers) == self._args.cp_size:
            del self._asked[request_id]
            errors = sorted({error for error in answers.values() if error})
            self._send_front(Reply(request_id, not errors, {"message": "; ".join(errors)} if errors else {}))

    def _answer_pauses(self) -> None:
        for request_id in self._pauses:
            self._send_front(Reply(request_id, True, {}))
        self._pauses = []

    def _is_drained(self) -> bool:
        return self._drain_deadline_s is not None and self.scheduler.is_idle()

    def _answer_flushes(self) -> None:
        """A flush is answered once the engine is idle, or when its time is over."""
        waiting = []
        for message, deadline_s in self._flushes:
            if self.scheduler.flush():
                self._send_front(Reply(message.request_id, True, {}))
            elif time.monotonic() >= deadline_s:
                load = self.scheduler.load()
                copies = ", copies to or from the host tier are under way" if self.scheduler.ledger.has_open_tickets() else ""
                text = f"not idle: {load['num_running_reqs']} requests run, {load['num_waiting_reqs']} wait{copies}"
                self._send_front(Reply(message.request_id, False, {"message": text}))
            else:
                waiting.append((message, deadline_s))
        self._flushes = waiting

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        self._reporter.tick()
        self._beat(now_s, self.scheduler.num_running, self.scheduler.num_waiting)
        if self._drain_deadline_s is not None and now_s > self._drain_deadline_s:
            self.scheduler.abort_all("the server is shutting down", 503)
        laggards = self.scheduler.laggards()
        for rank in range(self._args.cp_size):
            if rank not in laggards:
                self._last_progress_s[rank] = now_s
        silent = [str(rank) for rank, seen_s in enumerate(self._last_progress_s) if now_s - seen_s > self._args.watchdog_timeout_s]
        if silent:  # one of them hangs, the others may wait for it in a collective
            ranks = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(silent)
            step = self.scheduler.oldest_unretired_step
            raise EngineFailure(f"{ranks} made no progress for {self._args.watchdog_timeout_s:g} s in step {step}")
        ticket = self.scheduler.ledger.oldest_open_ticket()
        if self._host_work.oldest_age_s(ticket, now_s) > self._args.watchdog_timeout_s:
            raise EngineFailure(f"a copy between device and host (ticket {ticket}) has not ended within {self._args.watchdog_timeout_s:g} s")

    def _beat(self, now_s: float, num_running: int = 0, num_waiting: int = 0) -> None:
        """A sign of life for the front, about once a second, also while ranks load."""
        if now_s - self._last_heartbeat_s >= HEARTBEAT_S:
            self._last_heartbeat_s = now_s
            self._send_front(Heartbeat(num_running, num_waiting))

    def _state(self) -> dict[str, object]:
        return {
            "kv_ledger": self.scheduler.kv_ledger(),
            "last_gen_throughput": self._reporter.gen_throughput,
            "memory_usage": self._memory,
            "effective_max_running_requests_per_dp": self.sizes.num_slots,
            "totals": asdict(self.scheduler.totals),
            "queue_times": self._reporter.queue_times.report(),
            "lanes": self.scheduler.lanes(),
            "evictions": self.scheduler.ledger.evictions(),
            "sessions": self.scheduler.sessions.report(),
            "speculation": self.scheduler.speculation.report(),
            "host_cache": self._host_work.report(self.scheduler.ledger.host_report()),
            **self.scheduler.load(),
            **self.scheduler.set_aside(),
        }

    # --- sending -------------------------------------------------------------------------------------------------------

    def _broadcast(self, message: ToExecutor) -> None:
        for sender in self._to_executors:
            sender.send(message)

    def _send_front(self, message: FromPlanner) -> None:
        self._to_front.send(message)

    def fail(self, message: str) -> None:
        """Tell the front why the engine ends."""
        self._send_front(Fatal(message))

    def close(self) -> None:
        """Flush what is still to be sent; call before the process ends."""
        for sender in [*self._to_executors, self._to_front]:
            sender.close()
