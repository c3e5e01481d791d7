"""A planner without an engine: it speaks the front's protocol and echoes the prompt, so a test decides every output token.

    planner = FakePlanner(endpoints); planner.start(); ...; planner.stop()
Output tokens are the prompt's, over and over, until a stop token or the limit. Special first tokens change the behaviour (see `FATES`).
"""
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from sglane.plan.io_struct import (
    AbortRequest,
    ContinueGeneration,
    Endpoints,
    Fatal,
    FinishReason,
    FinishRequest,
    FlushCache,
    GenerateRequest,
    GetState,
    Heartbeat,
    LogprobChunk,
    PauseGeneration,
    PlannerReady,
    PrepareGrammar,
    Reply,
    RequestOutput,
    Shutdown,
    SpecCounts,
    StartProfile,
    StepOutputs,
    StopProfile,
    ToPlanner,
)
from sglane.utils.ipc import Receiver, Sender

POLL_MS = 2
HEARTBEAT_S = 0.2
QUEUE_FULL, GIVE_UP = 7001, 7002
#: First prompt token -> what happens to the request (or to the planner).
FATES = {QUEUE_FULL: "refused: the queue is full", GIVE_UP: "the planner says that it cannot go on"}

#: The answer to a question about the planner's state: two lanes, five requests so far.
STATE: dict[str, Any] = {
    "kv_ledger": {
        "page_size": 16, "cp_size": 2,
        "device": {"total": [128, 128], "free": [100, 90], "cached": [20, 30], "held": [7, 8], "tickets": [1, 0]},
        "host": {"total": [256, 256], "free": [200, 190], "cached": [40, 50], "held": [10, 11], "tickets": [6, 5]},
        "slots": {"total": 8, "free": 7}, "leases": 1, "requests": 1, "session_leases": 3, "fallbacks": {"tail_copy_skipped": 2},
    },
    "last_gen_throughput": 0.0,
    "memory_usage": {"devices": ["cpu", "cpu"], "weight_bytes": [10, 10], "kvcache_bytes": [5, 5], "token_capacity": 4096, "planes": []},
    "effective_max_running_requests_per_dp": 8,
    "totals": {"num_prompt_tokens": 300, "num_cached_tokens": 100, "num_output_tokens": 50, "num_requests": 5, "num_aborted": 1,
               "num_retractions": 3, "num_stalls": 4},
    "lanes": {
        "homes": [3, 2], "home_moves": [0, 6], "evicted_pages": [11, 29], "computed_tokens": [180, 170],
        "prefix_wait_seconds": [0.5, 1.25], "busiest_lane_tokens": 200,
        "page_waits": {"counts": [["1", "short", 2], ["any", "pending", 5]], "times": {"bounds_s": [0.01, 0.1], "counts": [4, 2, 1], "sum_s": 1.5}},
    },
    "evictions": {"num_tokens": 640, "times": {"bounds_s": [0.001, 0.01], "counts": [2, 1, 0], "sum_s": 0.006}},
    "sessions": {"num_open": 4, "num_leased": 2, "leased_tokens": 96},
    "host_cache": {
        "enabled": True, "page_bytes": 1000, "hits_device_tokens": 900, "hits_host_tokens": 480, "backup_duplicates": 7, "open_tickets": 2,
        "tickets": {
            "backup": {"tokens": 1600, "bytes": 100_000, "times": {"bounds_s": [0.01, 0.1], "counts": [5, 2, 0], "sum_s": 0.4}},
            "load": {"tokens": 480, "bytes": 30_000, "times": {"bounds_s": [0.01, 0.1], "counts": [1, 2, 1], "sum_s": 0.9}},
        },
        "dropped_tokens": {"no_room": 32, "evicted_before_end": 16, "host_evicted": 320},
    },
    "speculation": {
        "max_drafts": 3, "num_verify_steps": 40, "num_drafts": 100, "num_accepted": 60, "num_tokens": 100, "histogram": [10, 10, 10, 10],
        "by_source": {
            "none": {"num_verify_steps": 20, "num_drafts": 50, "num_accepted": 35, "num_tokens": 55},
            "device": {"num_verify_steps": 15, "num_drafts": 40, "num_accepted": 20, "num_tokens": 35},
            "host": {"num_verify_steps": 5, "num_drafts": 10, "num_accepted": 5, "num_tokens": 10},
        },
    },
    "queue_times": {"bounds_s": [0.01, 0.1], "counts": [3, 1, 1], "sum_s": 2.5},
    "num_paused_reqs": 0, "num_retracted_reqs": 1,
    "num_running_reqs": 0, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 33, "num_used_tokens": 512, "max_total_num_tokens": 4096,
    "token_usage": 0.125, "new_token_ratio": 0.5,
}


@dataclass
class Running:
    request: GenerateRequest
    prompt: list[int]
    num_sent: int = 0


@dataclass
class Behaviour:
    """What a test may change while the planner runs."""

    tokens_per_step: int = 1
    step_s: float = 0.0
    is_silent: bool = False
    is_busy: bool = False  # flushes are refused
    is_profiling: bool = False
    is_deaf: bool = False  # questions about its state are not answered
    max_request_tokens: int = 512
    spec: SpecCounts | None = None  # what every output says of speculation
    context_length: int = 1024
    received: list[Any] = field(default_factory=list)

    def calm(self) -> None:
        """The defaults again, but for the limits."""
        self.tokens_per_step, self.step_s, self.is_silent, self.is_busy = 1, 0.0, False, False
        self.spec = None
        self.received.clear()

    def received_of(self, kind: type) -> list[Any]:
        return [message for message in list(self.received) if isinstance(message, kind)]


class FakePlanner:
    """One loop in one thread."""

    def __init__(self, endpoints: Endpoints, behaviour: Behaviour | None = None):
        self.behaviour = behaviour or Behaviour()
        self._endpoints = endpoints
        self._running: dict[str, Running] = {}
        self._stopped = threading.Event()
        self._may_step = threading.Event()
        self._may_step.set()
        self._thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._may_step.set()
        self._thread.join(5.0)

    def hold(self) -> None:
        """No output from now on; messages are still read."""
        self._may_step.clear()

    def go_on(self) -> None:
        self._may_step.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    # --- loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        context = zmq.Context()
        receiver, sender = Receiver(context, self._endpoints.to_planner, ToPlanner), Sender(context, self._endpoints.to_front)
        behaviour = self.behaviour
        sender.send(PlannerReady(4096, behaviour.max_request_tokens, behaviour.context_length, 16, {"max_running_requests": 8}))
        last_heartbeat_s = 0.0
        while not self._stopped.is_set():
            receiver.poll(POLL_MS)
            for message in receiver.drain():
                behaviour.received.append(message)
                self._take(message, sender.send)
            if time.monotonic() - last_heartbeat_s > HEARTBEAT_S and not behaviour.is_silent:
                last_heartbeat_s = time.monotonic()
                sender.send(Heartbeat(len(self._running), 0))
            if self._may_step.is_set() and self._running:
                sender.send(StepOutputs([self._step(running) for running in list(self._running.values())]))
                time.sleep(behaviour.step_s)
        receiver.close()
        sender.close()
        context.term()

    def _take(self, message: Any, send: Callable[[Any], None]) -> None:
        if isinstance(message, GenerateRequest):
            self._admit(message, send)
        elif isinstance(message, FinishRequest):
            self._running.pop(message.rid, None)
        elif isinstance(message, AbortRequest):
            rids = list(self._running) if message.abort_all else [message.rid]
            gone = [self._running.pop(rid) for rid in rids if rid in self._running]
            send(StepOutputs([output(running, [], FinishReason("abort", message="aborted")) for running in gone]))
        elif isinstance(message, FlushCache):
            busy = self.behaviour.is_busy
            send(Reply(message.request_id, not busy, {"message": "not idle: 1 requests run, 0 wait"} if busy else {}))
        elif isinstance(message, GetState) and not self.behaviour.is_deaf:
            send(Reply(message.request_id, True, {**STATE, "num_running_reqs": len(self._running)}))
        elif isinstance(message, PauseGeneration | ContinueGeneration):
            (self.hold if isinstance(message, PauseGeneration) else self.go_on)()
            send(Reply(message.request_id, True, {}))
        elif isinstance(message, StartProfile | StopProfile):
            is_wrong = self.behaviour.is_profiling == isinstance(message, StartProfile)
            self.behaviour.is_profiling = isinstance(message, StartProfile)
            send(Reply(message.request_id, not is_wrong, {"message": "a recording is or is not under way"} if is_wrong else {}))
        elif isinstance(message, PrepareGrammar):
            send(Reply(message.request_id, True, {}))
        elif isinstance(message, Shutdown):
            gone = list(self._running.values())
            self._running.clear()
            reason = FinishReason("abort", message="the server is shutting down", status_code=503)
            send(StepOutputs([output(running, [], reason) for running in gone]))
            self._stopped.set()

    def _admit(self, request: GenerateRequest, send: Callable[[Any], None]) -> None:
        prompt = np.frombuffer(request.input_ids, np.int32).tolist()
        running = Running(request, prompt)
        if prompt[0] == QUEUE_FULL:
            reason = FinishReason("abort", message="the queue is full (1 requests wait)", status_code=503)
            send(StepOutputs([output(running, [], reason)]))
        elif prompt[0] == GIVE_UP:
            send(Fatal("rank 0: RuntimeError: a made-up reason"))
        else:
            self._running[request.rid] = running

    def _step(self, running: Running) -> RequestOutput:
        request, sampling = running.request, running.request.sampling
        tokens: list[int] = []
        finish = None
        while finish is None and len(tokens) < self.behaviour.tokens_per_step:
            token = running.prompt[(running.num_sent + len(tokens)) % len(running.prompt)]
            tokens.append(token)
            num_output = running.num_sent + len(tokens)
            if token in sampling.stop_token_ids and num_output > sampling.min_new_tokens:
                finish = FinishReason("stop", matched=token)
            elif num_output >= sampling.max_new_tokens:
                finish = FinishReason("length")
        message = msgspec.structs.replace(output(running, tokens, finish), spec=self.behaviour.spec)
        running.num_sent += len(tokens)
        if finish is not None:
            del self._running[request.rid]
        return message


def logprob_of(token: int) -> float:
    """The made-up log probability of a token; exact in float32."""
    return -(token % 8) / 4


def output(running: Running, tokens: list[int], finish: FinishReason | None) -> RequestOutput:
    request, num_prompt = running.request, len(running.prompt)
    sampling = request.sampling
    inputs, outputs = [], []
    if request.logprob_start >= 0 and running.num_sent == 0 and tokens:
        start = max(request.logprob_start, 1)
        if start < num_prompt:
            inputs.append(chunk(start, running.prompt[start:], sampling))
    if sampling.logprobs and tokens:
        outputs.append(chunk(num_prompt + running.num_sent, tokens, sampling))
    cached = num_prompt // 2
    return RequestOutput(request.rid, np.array(tokens, np.int32).tobytes(), num_prompt, running.num_sent + len(tokens), cached, cached, 0, 0, finish,
                         inputs, outputs)


def chunk(first_position: int, tokens: list[int], sampling: Any) -> LogprobChunk:
    num_top, asked = sampling.num_top_logprobs, sampling.logprob_token_ids
    top = [[token + rank for rank in range(num_top)] for token in tokens]
    return LogprobChunk(
        first_position, np.array(tokens, np.int32).tobytes(), np.array([logprob_of(token) for token in tokens], np.float32).tobytes(), num_top,
        np.array(top, np.int32).tobytes(), np.array([[-float(rank) for rank in range(num_top)] for _ in tokens], np.float32).tobytes(),
        np.array([[logprob_of(token) for token in asked] for _ in tokens], np.float32).tobytes(),
    )
