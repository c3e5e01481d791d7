"""What all routes share: the phase of the server, and the parts of it that exist once the engine is ready."""
import asyncio
import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglane import environ
from sglane.configs.model_config import ModelConfig
from sglane.entrypoints.engine_client import EngineClient
from sglane.entrypoints.errors import ApiError, bad_field
from sglane.entrypoints.grammar_checker import GrammarChecker, write_vocabulary
from sglane.entrypoints.request_builder import RequestBuilder
from sglane.entrypoints.sampling import ModelFacts, Sampling
from sglane.entrypoints.sessions import SessionBook
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.observability.metrics import Metrics
from sglane.observability.request_log import RequestLog
from sglane.observability.requests import RequestSink, RequestTracker
from sglane.plan.io_struct import PlannerReady
from sglane.server_args import ConfigError, ServerArgs, secrets

if TYPE_CHECKING:  # loaded with --enable-trace only
    from sglane.observability.tracing import Tracing

#: Stands for a secret.
HIDDEN = "***"

#: Seconds that the ranks get to compile a grammar that compiled on trial; a step under way comes first.
GRAMMAR_PATIENCE_S = 60.0


class Phase(Enum):
    STARTING = "starting"
    WARMING_UP = "warming up"  # requests are taken, /health still says no
    READY = "ready"
    DRAINING = "shutting down"  # running requests may finish
    STOPPED = "stopped"


#: (phase, verb) -> next phase. A pair that is not listed is a bug and raises.
TRANSITIONS = {
    (Phase.STARTING, "engine_ready"): Phase.WARMING_UP,
    (Phase.WARMING_UP, "warmed_up"): Phase.READY,
    (Phase.READY, "drain"): Phase.DRAINING,
    (Phase.STARTING, "stop"): Phase.STOPPED,
    (Phase.WARMING_UP, "stop"): Phase.STOPPED,
    (Phase.READY, "stop"): Phase.STOPPED,
    (Phase.DRAINING, "stop"): Phase.STOPPED,
}


@dataclass(frozen=True)
class Engine:
    """The parts that exist once the engine is ready."""

    client: EngineClient
    tokenizer: TextTokenizer | None
    facts: ModelFacts
    info: PlannerReady
    builder: RequestBuilder
    grammars: GrammarChecker | None
    sessions: SessionBook

    @staticmethod
    def assemble(client: EngineClient, tokenizer: TextTokenizer | None, config: ModelConfig, info: PlannerReady, vocabulary: str = "",
                 backend: str = "none", markers: tuple[str, ...] = ()) -> "Engine":
        """vocabulary: where to leave the tokens' bytes for structured output, by the library `backend`; empty: there is none.

        markers: texts that the server's parsers look for.
        """
        eos = dict.fromkeys([*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())])
        eos_token_ids = tuple(token for token in eos if 0 <= token < config.vocab_size)
        no_grammars = why_no_grammars(tokenizer, eos_token_ids, vocabulary)
        facts = ModelFacts(config.vocab_size, eos_token_ids, info.context_length, info.max_request_tokens, no_grammars, backend, markers)
        grammars = None
        if tokenizer is not None and not no_grammars:
            write_vocabulary(Path(vocabulary), tokenizer, config.vocab_size, eos_token_ids, markers)
            grammars = GrammarChecker(backend, Path(vocabulary), lambda grammar: client.prepare_grammar(grammar, GRAMMAR_PATIENCE_S))
        sessions = SessionBook(client.tell_session, client.abort, tokenizer.begin_token_id if tokenizer else None)
        return Engine(client, tokenizer, facts, info, RequestBuilder(client, facts, tokenizer), grammars, sessions)

    async def check_grammars(self, samplings: Iterable[Sampling]) -> None:
        """Raises a 400 for a grammar that can't be compiled."""
        for sampling in samplings:
            if sampling.params.grammar is not None:
                assert self.grammars is not None, "a grammar was let through"
                verdict = await self.grammars.check(sampling.params.grammar)
                if verdict:
                    raise bad_field(sampling.grammar_field, f"can't be used: {verdict}")


def why_no_grammars(tokenizer: TextTokenizer | None, eos_token_ids: tuple[int, ...], vocabulary: str) -> str:
    """Empty if structured output is possible."""
    if tokenizer is None:
        return "needs a tokenizer, but the server was started with --skip-tokenizer-init"
    if not vocabulary:
        return "is not available: the server was started with --grammar-backend none"
    if not tokenizer.pieces.are_bytes:
        return "needs a byte-level tokenizer, which this model does not have"
    return "" if eos_token_ids else "needs an end token, which this model does not have"


class ServerState:
    """Phase and engine; changed by the launcher's verbs only."""

    def __init__(self, args: ServerArgs, config: ModelConfig, launch_command: str):
        self.args = args
        self.config = config
        self.launch_command = launch_command
        self.phase = Phase.STARTING
        self.started_at = time.time()  # seconds since 1970
        self.startup_s = 0.0
        self.metrics = Metrics(self.model_name) if args.enable_metrics else None
        sinks: list[RequestSink] = [] if self.metrics is None else [self.metrics.requests]
        self.request_log = RequestLog(args.log_requests_level)
        if args.log_requests:
            sinks.append(self.request_log)
        self.tracing = make_tracing(args, self.model_name) if args.enable_trace else None
        if self.tracing is not None:
            sinks.append(self.tracing)
        self.tracker = RequestTracker(sinks, shows_times=args.enable_metrics)
        self._engine: Engine | None = None
        self._why = ""

    # --- verbs of the launcher ---------------------------------------------------------------------------------------

    def _fire(self, verb: str) -> None:
        key = (self.phase, verb)
        assert key in TRANSITIONS, f"server: '{verb}' in phase '{self.phase.value}'"
        self.phase = TRANSITIONS[key]

    def engine_ready(self, engine: Engine) -> None:
        self._fire("engine_ready")
        self._engine = engine

    def warmed_up(self) -> None:
        self._fire("warmed_up")
        self.startup_s = time.time() - self.started_at

    def drain(self) -> None:
        self._fire("drain")

    def stop(self, why: str) -> None:
        self._fire("stop")
        self._why = why

    async def end_helpers(self) -> None:
        """What ends with the server: the grammar worker, the sender of traces."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.end)
        if self._engine is not None and self._engine.grammars is not None:
            await self._engine.grammars.close()

    # --- for the routes ----------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self.args.served_model_name or self.config.source.path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")

    def engine(self) -> Engine:
        """For questions about the engine; raises a 503 before it is ready and after it has ended."""
        if self._engine is None or self.phase is Phase.STOPPED:
            raise ApiError(503, self.why_not())
        return self._engine

    def engine_for_requests(self) -> Engine:
        """For new work; raises a 503 also while the server drains."""
        if self.phase not in (Phase.WARMING_UP, Phase.READY):
            raise ApiError(503, self.why_not())
        return self.engine()

    def why_not(self) -> str:
        return self._why or f"the server is {self.phase.value}"

    def silence_s(self) -> float:
        """Seconds since the planner's last sign of life."""
        return time.monotonic() - self.engine().client.last_sign_s

    def check_health(self) -> None:
        """Raises a 503 unless the server is ready and the planner's loop turns. A busy engine is healthy."""
        if self.phase is not Phase.READY:
            raise ApiError(503, self.why_not())
        silence_s = self.silence_s()
        if silence_s > self.args.health_timeout_s:
            raise ApiError(503, f"the engine gave no sign of life for {silence_s:.0f} s")

    def flat_args(self) -> dict[str, Any]:
        """All flags as they were resolved; of secrets only whether they are set."""
        hidden = {name: HIDDEN for name in secrets() if getattr(self.args, name) is not None}
        num_drafts = self.args.num_drafts()
        drafts = {"speculative_num_steps": num_drafts, "speculative_num_draft_tokens": num_drafts + 1} if num_drafts else {}
        return {**dataclasses.asdict(self.args), **hidden, **drafts, "model_path": self.config.source.path, "served_model_name": self.model_name,
                "tokenizer_path": self.tokenizer_path}

    @property
    def tokenizer_path(self) -> str:
        return self.args.tokenizer_path or self.config.source.path


def make_tracing(args: ServerArgs, model_name: str) -> "Tracing":
    """Raises ConfigError when a package is missing, or for a protocol that there is not."""
    try:
        from sglane.observability.tracing import Tracing, make_exporter

        exporter = make_exporter(environ.OTEL_TRACES_PROTOCOL, args.otlp_traces_endpoint)
    except ImportError as error:
        raise ConfigError(f"--enable-trace needs the extra `trace` (pip install 'sglane[trace]'): {error}") from error
    except ValueError as error:
        raise ConfigError(f"--enable-trace: {error}") from error
    return Tracing(exporter, model_name)


async def until_idle(client: EngineClient, deadline_s: float) -> bool:
    """Wait until every HTTP request is answered; False when `deadline_s` (time.monotonic) passes first."""
    while client.num_jobs:
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True
