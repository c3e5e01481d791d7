"""The front's account of one generation: tokens, text, log probabilities, why it ended. Fed by `absorb`, read by the routes."""
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sglane.entrypoints.detokenizer import Detokenizer
from sglane.entrypoints.sampling import TextParams
from sglane.entrypoints.sessions import Turn
from sglane.entrypoints.stop_matcher import PatternTooSlow, make_matcher
from sglane.observability.requests import Record
from sglane.plan.io_struct import FinishReason, GenerateRequest, LogprobChunk, RequestOutput, SpecCounts


class TokenLogprob(NamedTuple):
    """One position: the token, its log probability, the best ones, the asked ones (in the order of the request)."""

    token_id: int
    logprob: float | None  # None: the first token of a prompt has none
    top: list[tuple[float, int]]  # (log probability, token id), descending
    asked: list[float]


@dataclass(frozen=True)
class Finish:
    """kind: stop (matched: token id or string), length (length: output tokens), abort (message, status_code; 0 = by request)."""

    kind: str
    matched: int | str | None = None
    length: int = 0
    message: str = ""
    status_code: int = 0


@dataclass(frozen=True)
class LogprobWish:
    """What a request wants to know about probabilities. start: first prompt position, -1: none."""

    output: bool = False
    start: int = -1
    num_top: int = 0
    asked_ids: Sequence[int] = field(default_factory=list)
    with_text: bool = False


@dataclass
class Counts:
    """The planner's figures for one request. Tokens."""

    cached: int = 0
    cached_device: int = 0
    cached_host: int = 0
    retractions: int = 0


class Generation:
    """One prompt, one choice."""

    def __init__(self, index: int, name: str, request: GenerateRequest, wish: LogprobWish, text_params: TextParams, detokenizer: Detokenizer | None):
        """index: place in the answer. name: the client's rid. detokenizer None: no text."""
        self.index = index
        self.name = name
        self.request = request
        self.wish = wish
        self.text_params = text_params
        self.num_prompt_tokens = len(request.input_ids) // 4
        self.text = ""  # without what may still become part of a stop string
        self.output_ids: list[int] = []
        self.output_logprobs: list[TokenLogprob] = []
        # Of a prompt of one token nothing has to be computed, so the planner has nothing to tell.
        self.input_logprobs = prompt_logprobs(request, []) if request.logprob_start == 0 and self.num_prompt_tokens == 1 else []
        self.counts = Counts()
        self.spec: SpecCounts | None = None  # None: the server does not speculate
        self.finish: Finish | None = None
        self.drop_output = False
        self.times: Record | None = None  # None: the answer does not tell them
        self._turn: Turn | None = None  # None: it belongs to no session
        self._detokenizer = detokenizer
        self._stops = make_matcher(text_params.stops, text_params.stop_patterns, text_params.keep_stop)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    def prompt_ids(self) -> list[int]:
        return np.frombuffer(self.request.input_ids, np.int32).tolist()

    def show_times(self, record: Record) -> None:
        """The answer tells when what happened."""
        self.times = record

    def follow(self, turn: Turn) -> None:
        """It is a request of a session."""
        self._turn = turn

    def begin_turn(self) -> None:
        """It goes to the planner."""
        if self._turn is not None:
            self._turn.started(self.output_ids)

    def end_turn(self) -> None:
        """It has ended, or its client has left."""
        if self._turn is not None:
            self._turn.ended(is_kept=self.finish is not None and self.finish.kind != "abort")

    def without_output(self) -> None:
        """Only the prompt is of interest (max_new_tokens 0): the one token that the engine samples is dropped."""
        self.drop_output = True

    def absorb(self, output: RequestOutput) -> int | None:
        """Take what a step brought. Returns the number of output tokens to keep when a stop string ends the generation here."""
        self.counts = Counts(output.num_cached_tokens, output.num_cached_device, output.num_cached_host, output.num_retractions)
        self.spec = output.spec
        if output.input_logprobs:
            self.input_logprobs = prompt_logprobs(self.request, output.input_logprobs)
        if self.drop_output:
            if output.finish is not None:
                self._end(output.finish if output.finish.kind == "abort" else FinishReason(kind="length"))
            return None
        for chunk in output.output_logprobs:
            self.output_logprobs.extend(entries(chunk))
        cut = self._take_tokens(np.frombuffer(output.token_ids, np.int32).tolist(), output.finish)
        if cut is not None:
            return cut
        if output.finish is not None:
            self._end(output.finish)
        return None

    def _take_tokens(self, tokens: list[int], finish: FinishReason | None) -> int | None:
        """Tokens go through one by one, so that the outcome does not depend on how they were grouped."""
        stop_token = finish.matched if finish is not None and finish.kind == "stop" else None
        for position, token in enumerate(tokens, start=1):
            self.output_ids.append(token)
            hidden = position == len(tokens) and token == stop_token and not self.text_params.keep_stop
            if self._detokenizer is not None and not hidden and self._show(self._detokenizer.step(token)):
                return self.num_output_tokens
        return None

    def _show(self, piece: str) -> bool:
        """Add text; True: a stop string ends it."""
        if self.num_output_tokens <= self.request.sampling.min_new_tokens:
            self.text += piece  # too early to stop
            return False
        try:
            shown, stop = self._stops.feed(piece)
        except PatternTooSlow as error:
            self.finish = Finish("abort", message=f"stop_regex {error}", status_code=400)
            return True
        self.text += shown
        if stop is None:
            return False
        del self.output_logprobs[self.num_output_tokens :]
        self.finish = Finish("stop", matched=stop)
        return True

    def _end(self, reason: FinishReason) -> None:
        if self._detokenizer is not None and not self._show(self._detokenizer.flush()):
            self.text += self._stops.flush()
        if self.finish is None:
            length = self.num_output_tokens if reason.kind == "length" else 0
            self.finish = Finish(reason.kind, reason.matched, length, reason.message, reason.status_code)

    def fail(self, message: str, status_code: int) -> None:
        """End without the planner."""
        if self.finish is None:
            self._end(FinishReason(kind="abort", message=message, status_code=status_code))


def entries(chunk: LogprobChunk) -> list[TokenLogprob]:
    """A chunk's arrays -> one entry per position."""
    token_ids = np.frombuffer(chunk.token_ids, np.int32).tolist()
    num_tokens = len(token_ids)
    logprobs = np.frombuffer(chunk.logprobs, np.float32).tolist()
    top_ids = np.frombuffer(chunk.top_ids, np.int32).reshape(num_tokens, chunk.num_top).tolist()  # [n, k]
    top = np.frombuffer(chunk.top_logprobs, np.float32).reshape(num_tokens, chunk.num_top).tolist()  # [n, k]
    asked = np.frombuffer(chunk.asked_logprobs, np.float32)
    asked_rows = asked.reshape(num_tokens, -1).tolist() if len(asked) else [[] for _ in token_ids]  # [n, m]
    return [TokenLogprob(token, logprob, list(zip(best, ids)), rest)
            for token, logprob, best, ids, rest in zip(token_ids, logprobs, top, top_ids, asked_rows)]


def prompt_logprobs(request: GenerateRequest, chunks: Sequence[LogprobChunk]) -> list[TokenLogprob]:
    """Entries for all prompt positions from `logprob_start` on; position 0 has no log probability."""
    known: dict[int, TokenLogprob] = {}
    for chunk in chunks:
        known.update(enumerate(entries(chunk), start=chunk.first_position))
    token_ids = np.frombuffer(request.input_ids, np.int32).tolist()
    return [known.get(position) or TokenLogprob(token_ids[position], None, [], []) for position in range(request.logprob_start, len(token_ids))]
