"""The front's end of the channel to the planner: requests out, outputs fanned out to the generations they belong to.

Everything here runs on the event loop's thread and nothing waits: waiting is the job's business.
"""
import asyncio
import logging
import time
from typing import Any

import zmq

from sglane.entrypoints.errors import ApiError, ClientGone, bad_field
from sglane.entrypoints.generation import Generation
from sglane.observability.requests import Caller, RequestTracker
from sglane.plan.io_struct import (
    AbortRequest,
    CloseSession,
    ContinueGeneration,
    Endpoints,
    Fatal,
    FinishRequest,
    FlushCache,
    FromPlanner,
    GetState,
    Grammar,
    Heartbeat,
    OpenSession,
    PauseGeneration,
    PlannerReady,
    PrepareGrammar,
    Reply,
    RequestOutput,
    SetLogLevel,
    Shutdown,
    StartProfile,
    StepOutputs,
    StopProfile,
)
from sglane.utils.ipc import Receiver, Sender

logger = logging.getLogger(__name__)

ABORTED = "aborted by request"
Question = FlushCache | GetState | PrepareGrammar | PauseGeneration | ContinueGeneration | StartProfile | StopProfile


class Claim:
    """A client's name for a prompt (its rid) while any of its generations runs."""

    def __init__(self, name: str):
        self.name = name
        self.aborted = False
        self.running: set[str] = set()  # rids as the planner knows them

    def abort(self) -> None:
        self.aborted = True

    def add(self, rid: str) -> None:
        self.running.add(rid)

    def remove(self, rid: str) -> None:
        self.running.discard(rid)


class Job:
    """All generations of one HTTP request. Its owner waits here for news; `close` ends whatever still runs."""

    def __init__(self, client: "EngineClient", names: list[str], is_probe: bool, caller: Caller | None):
        self.is_probe = is_probe
        self.caller = caller
        self._client = client
        self._changed: dict[int, Generation] = {}
        self._event = asyncio.Event()
        self._gone = False
        self.names = names
        self.generations: list[Generation] = []
        self.wants_updates = False
        self.received_s = time.monotonic()

    def submit(self, generations: list[Generation], wants_updates: bool) -> None:
        """Hand the generations to the planner. wants_updates: wake the owner for every output, not only for ends."""
        self.wants_updates = wants_updates
        self._client.submit(self, generations)
        self.generations = generations

    def notify(self, generation: Generation) -> None:
        """Something is new about a generation."""
        if self.wants_updates or generation.finish is not None:
            self._changed[generation.index] = generation
            self._event.set()

    async def changes(self) -> list[Generation]:
        """Wait for news; the generations that have some, in order of the answer. Raises ClientGone after `leave`."""
        await self._event.wait()
        self._event.clear()
        if self._gone:
            raise ClientGone
        changed, self._changed = self._changed, {}
        return [changed[index] for index in sorted(changed)]

    async def all_done(self) -> list[Generation]:
        """Wait for the end of all generations. The first that was refused or failed is raised as an ApiError."""
        while any(generation.finish is None for generation in self.generations):
            raise_failure(await self.changes())
        if self._gone:
            raise ClientGone
        raise_failure(self.generations)
        return self.generations

    def leave(self) -> None:
        """The client is gone: end everything and wake the owner."""
        self._gone = True
        self.close()
        self._event.set()

    def close(self) -> None:
        """End what still runs and forget the names. Idempotent."""
        self._client.close_job(self)


def raise_failure(generations: list[Generation]) -> None:
    for generation in generations:
        if generation.finish is not None and generation.finish.status_code:
            raise ApiError(generation.finish.status_code, generation.finish.message)


class EngineClient:
    """Owner of both sockets, of the claimed names and of the generations under way."""

    def __init__(self, context: zmq.Context, endpoints: Endpoints, tracker: RequestTracker):
        self._sender = Sender(context, endpoints.to_planner)
        self._receiver = Receiver(context, endpoints.to_front, FromPlanner)
        self._tracker = tracker
        self._loop = asyncio.get_running_loop()
        self._claims: dict[str, Claim] = {}
        self._running: dict[str, tuple[Generation, Job]] = {}  # by the planner's rid
        self._jobs: set[Job] = set()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._failure: str | None = None
        self._next_id = 0
        self._output_waiters: list[asyncio.Future[None]] = []
        self.ready: asyncio.Future[PlannerReady] = self._loop.create_future()
        self.fatal: asyncio.Future[str] = self._loop.create_future()  # why the planner says that it ends
        self.is_paused = False
        self.last_sign_s = time.monotonic()
        self.load = Heartbeat(0, 0)
        self._descriptor = self._receiver.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self.receive)

    # --- from the planner --------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take every message that is there."""
        for message in self._receiver.drain():
            self.last_sign_s = time.monotonic()
            if isinstance(message, StepOutputs):
                self._tracker.admitted(message.queue_s)
                for output in message.outputs:
                    self._on_output(output)
                self._wake_output_waiters()
            elif isinstance(message, Reply):
                future = self._replies.pop(message.request_id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, Heartbeat):
                self.load = message
            elif isinstance(message, PlannerReady):
                self.ready.set_result(message)
            elif isinstance(message, Fatal) and not self.fatal.done():
                self.fatal.set_result(message.message)

    def _on_output(self, output: RequestOutput) -> None:
        entry = self._running.get(output.rid)
        if entry is None:
            return  # cut, aborted or left; its last tokens were under way
        generation, job = entry
        cut = generation.absorb(output)
        self._tracker.output(output, generation.num_output_tokens)
        if cut is not None:
            self._sender.send(FinishRequest(output.rid, cut))
        if generation.finish is not None:
            self._forget(output.rid)
        job.notify(generation)

    def _forget(self, rid: str) -> None:
        generation, _ = self._running.pop(rid)
        finish = generation.finish
        if finish is None:
            self._tracker.ended(rid, "left", 0, "the client is gone", generation.text, generation.output_ids)
        else:
            self._tracker.ended(rid, finish.kind, finish.status_code, finish.message, generation.text, generation.output_ids)
        generation.end_turn()
        claim = self._claims[generation.name]
        claim.remove(rid)
        if not claim.running:
            del self._claims[generation.name]

    # --- jobs --------------------------------------------------------------------------------------------------------

    def open_job(self, names: list[str], caller: Caller | None = None, *, is_probe: bool = False) -> Job:
        """Claim the rids of one HTTP request; a rid that is active is a 400. A probe is neither counted nor logged.

        caller: `caller_of` the HTTP request.
        """
        claims = {name: Claim(name) for name in names}
        taken = self._claims.keys() & claims
        if taken:
            raise bad_field("rid", f"{min(taken)[:80]!r} is already used by an active request")
        if len(claims) < len(names):
            raise bad_field("rid", "must be different for every prompt of a batch")
        self._claims.update(claims)
        job = Job(self, names, is_probe, caller)
        self._jobs.add(job)
        return job

    def submit(self, job: Job, generations: list[Generation]) -> None:
        """Send all generations of a job; one whose name was aborted in between ends at once. Raises a 503 when the engine has ended."""
        if self._failure is not None:
            raise ApiError(503, self._failure)
        for generation in generations:
            claim = self._claims[generation.name]
            rid = generation.request.rid
            claim.add(rid)
            self._running[rid] = (generation, job)
            generation.begin_turn()
            if not job.is_probe:
                record = self._tracker.started(generation.request, generation.name, job.wants_updates, job.received_s, job.caller)
                if record is not None and self._tracker.shows_times:
                    generation.show_times(record)
        for generation in generations:
            if self._claims[generation.name].aborted:
                generation.fail(ABORTED, 0)
                job.notify(generation)
            else:
                self._sender.send(generation.request)
        for generation in generations:
            if generation.finish is not None:
                self._forget(generation.request.rid)

    def new_rid(self, name: str) -> str:
        """A rid for the planner: unique, so that late outputs of an ended request never reach a new one of the same name."""
        self._next_id += 1
        return f"{self._next_id}:{name[:64]}"

    def close_job(self, job: Job) -> None:
        """Abort what the planner still runs (before its state is dropped), then forget the job."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        for generation in job.generations:
            rid = generation.request.rid
            if rid in self._running:
                self._sender.send(AbortRequest(rid))
                self._forget(rid)
        if not job.generations:  # it never got as far as being sent
            for name in job.names:
                del self._claims[name]

    def abort(self, name: str) -> None:
        """End the generations of one name; the planner answers with their last outputs. Unknown names are ignored."""
        claim = self._claims.get(name)
        if claim is not None:
            claim.abort()
            for rid in claim.running:
                self._sender.send(AbortRequest(rid))

    def abort_all(self) -> None:
        for claim in self._claims.values():
            claim.abort()
        self._sender.send(AbortRequest(abort_all=True))

    @property
    def num_jobs(self) -> int:
        """HTTP requests that are not answered completely."""
        return len(self._jobs)

    # --- questions ---------------------------------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float, patience_s: float) -> Reply:
        """Waits up to timeout_s for an idle engine, and patience_s longer for the planner's answer."""
        return await self._ask(FlushCache(self._new_question(), timeout_s), timeout_s + patience_s)

    async def get_state(self, patience_s: float) -> dict[str, Any]:
        """The planner's state. Raises a 503 when it does not answer."""
        reply = await self._ask(GetState(self._new_question()), patience_s)
        return reply.payload

    async def prepare_grammar(self, grammar: Grammar, patience_s: float) -> None:
        """Returns when every rank has compiled it. Raises a 503 when that takes too long."""
        await self._ask(PrepareGrammar(self._new_question(), grammar), patience_s)

    async def pause(self, mode: str, patience_s: float) -> None:
        """See PauseGeneration; returns when no step is under way. Raises a 503 when that takes too long."""
        self.is_paused = True
        if mode == "abort":
            for claim in self._claims.values():
                claim.abort()
        await self._ask(PauseGeneration(self._new_question(), mode), patience_s)

    async def resume(self, patience_s: float) -> None:
        self.is_paused = False
        await self._ask(ContinueGeneration(self._new_question()), patience_s)

    async def start_profile(self, folder: str, name: str, num_steps: int | None, activities: list[str], with_stack: bool, record_shapes: bool,
                            patience_s: float) -> Reply:
        """See StartProfile. The reply has every rank's error."""
        question = StartProfile(request_id=self._new_question(), folder=folder, name=name, num_steps=num_steps, activities=activities,
                                with_stack=with_stack, record_shapes=record_shapes)
        return await self._ask(question, patience_s)

    async def stop_profile(self, patience_s: float) -> Reply:
        """Returns when every rank has written its recording."""
        return await self._ask(StopProfile(self._new_question()), patience_s)

    def warm_grammars(self) -> None:
        """Have the ranks load the library and the vocabulary beside their steps; nobody waits for the answer."""
        self._sender.send(PrepareGrammar(0, Grammar("regex", "a")))

    def tell_session(self, message: OpenSession | CloseSession) -> None:
        """A session begins or ends; there is no answer."""
        self._sender.send(message)

    def set_log_level(self, level: str) -> None:
        """Of the other processes."""
        self._sender.send(SetLogLevel(level))

    def _new_question(self) -> int:
        self._next_id += 1
        self._replies[self._next_id] = self._loop.create_future()
        return self._next_id

    async def _ask(self, question: Question, timeout_s: float) -> Reply:
        future = self._replies[question.request_id]
        self._sender.send(question)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise ApiError(503, f"the engine did not answer within {timeout_s:g} s") from error
        finally:
            self._replies.pop(question.request_id, None)

    def next_output(self) -> asyncio.Future[None]:
        """Done as soon as the engine has produced anything for anybody."""
        future = self._loop.create_future()
        self._output_waiters.append(future)
        return future

    def _wake_output_waiters(self) -> None:
        waiters, self._output_waiters = self._output_waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    # --- end ---------------------------------------------------------------------------------------------------------

    def shutdown(self, drain_s: float) -> None:
        """Ask the planner to end after its running requests."""
        self._sender.send(Shutdown(drain_s))

    def end_pause(self) -> None:
        """Requests under way may finish; nobody waits for the answer."""
        self.is_paused = False
        self._sender.send(ContinueGeneration(0))

    def fail_all(self, message: str) -> None:
        """The engine is gone: everybody who waits gets an answer now."""
        self._failure = message
        for rid, (generation, job) in list(self._running.items()):
            generation.fail(message, 503)
            self._forget(rid)
            job.notify(generation)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(ApiError(503, message))

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._sender.close()
        self._receiver.close()
