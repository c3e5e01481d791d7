"""Messages between the front and the planner. Frozen; token ids travel as int32 bytes, never as lists."""
from typing import Any

import msgspec


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must match. The front has tried it out; the executors compile it again and mask the logits."""

    kind: str  # json_schema | regex | ebnf | structural_tag
    text: str
    strict: bool = True  # json_schema: objects have no properties but those that the schema names
    thoughts: str = ""  # in front of the answer, up to `</think>`, nothing is ruled out. inside: they have begun; maybe: a `<think>` begins them


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated sampling parameters of one request (one choice). Text-level fields (stop strings) stay in the front."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 = whole vocabulary
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # always set by the front: the client's, or a random one
    stop_token_ids: list[int] = []  # the model's end tokens included unless ignore_eos
    logit_bias: dict[int, float] = {}
    logprobs: bool = False  # report the log probability of every output token
    num_top_logprobs: int = 0
    logprob_token_ids: list[int] = []  # also report these ids at every reported position
    grammar: Grammar | None = None
    max_drafts: int = -1  # drafts verified per step at most; -1: as many as the server drafts; 0: no speculation

    def needs_history(self) -> bool:
        """The executors need all tokens of the request, cached ones included."""
        return self.has_penalties() or self.grammar is not None

    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate", kw_only=True):
    """One prompt, one choice. The front expands batches and n > 1 into several of these."""

    rid: str
    input_ids: bytes  # int32 [n], n >= 1
    sampling: SamplingParams
    namespace: str = ""  # kind-tagged: "" | "salt:..." | "extra:..." and combinations; prefixes are shared only inside one
    priority: int = 0  # larger first
    logprob_start: int = -1  # first prompt position whose log probability is wanted; -1: none
    session: str = ""  # of OpenSession; what it leaves in the cache is leased for the session; empty: none


class FinishRequest(msgspec.Struct, frozen=True, tag="finish"):
    """A stop string was found in the text: keep `num_output_tokens` output tokens. Idempotent; unknown rids are ignored."""

    rid: str
    num_output_tokens: int


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """The client left or asked for an abort. Idempotent; unknown rids are ignored."""

    rid: str = ""
    abort_all: bool = False


class OpenSession(msgspec.Struct, frozen=True, tag="open_session"):
    """From now on what a request of this session leaves in the cache is leased. A name is used once."""

    session: str


class CloseSession(msgspec.Struct, frozen=True, tag="close_session"):
    """Its lease ends. The client closed it, or it was not used for too long."""

    session: str


class FlushCache(msgspec.Struct, frozen=True, tag="flush"):
    """Drop the whole prefix cache when idle; wait up to `timeout_s` for idle. Answered by `Reply`."""

    request_id: int
    timeout_s: float = 0.0


class GetState(msgspec.Struct, frozen=True, tag="get_state"):
    """Ask for the planner's state (ledger, load). Answered by `Reply` with a dict."""

    request_id: int


class PrepareGrammar(msgspec.Struct, frozen=True, tag="prepare_grammar"):
    """Compile a grammar that was tried out, on every rank, beside the steps. Passed on by the planner; answered by `Reply` when all have it."""

    request_id: int
    grammar: Grammar


class PauseGeneration(msgspec.Struct, frozen=True, tag="pause"):
    """No new steps until `ContinueGeneration`. Answered by `Reply` when no step is under way any more.

    mode: abort ends every request; retract sends the running ones back to the queue; in_place leaves them where they are.
    """

    request_id: int
    mode: str


class ContinueGeneration(msgspec.Struct, frozen=True, tag="continue"):
    """End of a pause, or nothing if there is none. Answered by `Reply`."""

    request_id: int


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile", kw_only=True):
    """Every rank records its steps. Passed on by the planner; answered by `Reply` when all have begun."""

    request_id: int
    folder: str
    name: str  # what the files' names begin with
    num_steps: int | None  # None: until StopProfile
    activities: list[str]  # CPU, GPU
    with_stack: bool
    record_shapes: bool


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write the recording. Passed on by the planner; answered by `Reply` when all ranks have written it."""

    request_id: int


class SetLogLevel(msgspec.Struct, frozen=True, tag="log_level"):
    """For the planner and, passed on, every rank."""

    level: str  # debug | info | warning | error


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish what runs (up to `drain_s`), then end."""

    drain_s: float


class LogprobChunk(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities in order of position; same layout as the executors' LogprobBlock, for the front."""

    first_position: int
    token_ids: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]
    num_top: int = 0
    top_ids: bytes = b""  # int32 [n, k]
    top_logprobs: bytes = b""  # float32 [n, k]
    asked_logprobs: bytes = b""  # float32 [n, m]


class FinishReason(msgspec.Struct, frozen=True):
    """kind: stop (token id in `matched`), length, abort (message, status_code)."""

    kind: str
    matched: int | None = None
    message: str = ""
    status_code: int = 0


class SpecCounts(msgspec.Struct, frozen=True, array_like=True):
    """What speculation brought a request so far."""

    num_verify_steps: int  # decode steps, those without a draft included
    num_drafts: int  # drafts that were verified
    num_accepted: int  # of them
    histogram: list[int]  # [k + 1] steps by accepted drafts


class RequestOutput(msgspec.Struct, frozen=True):
    """New tokens of one request after a step. The last one has `finish`."""

    rid: str
    token_ids: bytes  # int32, new output tokens, stop token included
    num_prompt_tokens: int
    num_output_tokens: int  # in total so far
    num_cached_tokens: int  # prompt tokens that were not recomputed at first admission
    num_cached_device: int
    num_cached_host: int
    num_retractions: int
    finish: FinishReason | None = None
    input_logprobs: list[LogprobChunk] = []  # only once, with the first output
    output_logprobs: list[LogprobChunk] = []
    spec: SpecCounts | None = None  # None: the server does not speculate


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything a step has for the front, one message a step."""

    outputs: list[RequestOutput]
    queue_s: dict[str, float] = {}  # rid -> seconds in the queue, of requests first admitted since the last message


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    request_id: int
    ok: bool
    payload: dict[str, Any]


class PlannerReady(msgspec.Struct, frozen=True, tag="planner_ready"):
    """All ranks are up; requests are accepted."""

    max_total_tokens: int
    max_request_tokens: int  # prompt + output of one request; min(context length, what the pool can hold)
    context_length: int
    page_size: int
    info: dict[str, Any]  # memory usage and the like, for /server_info


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The planner's loop is alive; sent about once a second, busy or idle."""

    num_running: int
    num_waiting: int


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on: fail everything with this message and exit."""

    message: str


ToPlanner = (
    GenerateRequest | FinishRequest | AbortRequest | OpenSession | CloseSession | FlushCache | GetState | PrepareGrammar | PauseGeneration
    | ContinueGeneration | StartProfile | StopProfile | SetLogLevel | Shutdown
)
FromPlanner = StepOutputs | Reply | PlannerReady | Heartbeat | Fatal


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """ZeroMQ addresses as one node of a server sees them. Every socket is PUSH -> PULL; the PULL side binds."""

    to_planner: str  # front -> planner
    to_front: str  # planner -> front
    to_executors: list[str]  # planner -> rank i; where that rank binds, port * if it may choose
    from_executors: str  # all ranks -> planner
    rendezvous: str  # torch.distributed init_method of the ranks
    vocabulary: str = ""  # file: the tokens' bytes, written by the front before it takes requests
    from_other_nodes: str = ""  # executors of other nodes -> planner, which binds it too; empty: all are on this host
    interface: str = ""  # network interface on which the ranks of several nodes meet; empty: gloo chooses
    lifeline: str = ""  # HOST:PORT to which an executor of another node stays connected; empty on node 0
