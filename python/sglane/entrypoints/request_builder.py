"""Prompts and parameters of one HTTP request -> generations. The same for all routes."""
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from sglane.entrypoints.engine_client import EngineClient, Job
from sglane.entrypoints.errors import ApiError, bad_field
from sglane.entrypoints.generation import Generation, LogprobWish
from sglane.entrypoints.sampling import ModelFacts, Sampling
from sglane.entrypoints.sessions import SessionBook, Turn, Wish
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields, check_rid, per_item
from sglane.plan.io_struct import GenerateRequest

MAX_GENERATIONS = 4096  # prompts times choices of one HTTP request
#: Log probabilities of prompt tokens that one HTTP request may ask for (positions times the tokens at each): they all come at once.
MAX_PROMPT_LOGPROBS = 1 << 22
MAX_PRIORITY = 1 << 31
#: Prefill/decode hand-over; null where a router fills in nothing.
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank")


@dataclass(frozen=True)
class Prompt:
    """One prompt with everything that is asked of it."""

    name: str  # rid
    token_ids: npt.NDArray[np.int32]
    sampling: Sampling
    wish: LogprobWish
    namespace: str
    priority: int
    field: str  # where the prompt stood in the request, for messages
    turn: Turn | None = None  # None: it belongs to no session


class RequestBuilder:
    """Knows the engine's limits; makes generations."""

    def __init__(self, client: EngineClient, facts: ModelFacts, tokenizer: TextTokenizer | None):
        self._client = client
        self._facts = facts
        self._tokenizer = tokenizer

    def check_length(self, prompt: Prompt) -> int:
        """Tokens that fit after the prompt. Raises a 400 for an empty or too long prompt and ids outside the vocabulary."""
        num_tokens, limit = len(prompt.token_ids), self._facts.max_request_tokens
        if num_tokens == 0:
            raise bad_field(prompt.field, "must not be empty: the prompt has no tokens")
        if num_tokens >= limit:
            raise bad_field(prompt.field, f"is too long: {num_tokens} tokens; prompt and output together are limited to {limit} tokens")
        largest = int(prompt.token_ids.max())
        if largest >= self._facts.vocab_size:
            raise bad_field(prompt.field, f"has token id {largest}, which is outside the vocabulary [0, {self._facts.vocab_size - 1}]")
        if prompt.wish.start > num_tokens:
            raise bad_field("logprob_start_len", f"is {prompt.wish.start}, but the prompt has only {num_tokens} tokens")
        return limit - num_tokens

    def submit(self, job: Job, prompts: Sequence[Prompt], wants_updates: bool) -> None:
        """Expand prompts and choices into generations (in this order) and hand them to the planner."""
        rooms = [self.check_length(prompt) for prompt in prompts]
        if sum(prompt.sampling.num_choices for prompt in prompts) > MAX_GENERATIONS:
            raise bad_field("n", f"times the number of prompts is more than {MAX_GENERATIONS}")
        if (num_values := sum(num_prompt_logprobs(prompt) for prompt in prompts)) > MAX_PROMPT_LOGPROBS:
            name = "logprobs" if prompts[0].field == "prompt" else "logprob_start_len"
            raise bad_field(name, f"asks for {num_values} log probabilities of prompt tokens, more than {MAX_PROMPT_LOGPROBS}: "
                                  "start later, or ask for fewer at each position")
        generations: list[Generation] = []
        for prompt, room in zip(prompts, rooms):
            for choice in range(prompt.sampling.num_choices):
                generations.append(self._make(prompt, room, choice, len(generations)))
        job.submit(generations, wants_updates)

    def _make(self, prompt: Prompt, room: int, choice: int, index: int) -> Generation:
        sampling, wish = prompt.sampling.for_choice(choice, room), prompt.wish
        if wish.output:
            sampling = msgspec.structs.replace(sampling, logprobs=True, num_top_logprobs=wish.num_top, logprob_token_ids=list(wish.asked_ids))
        start = wish.start if 0 <= wish.start < len(prompt.token_ids) else -1
        request = GenerateRequest(
            rid=self._client.new_rid(prompt.name), input_ids=prompt.token_ids.tobytes(), sampling=sampling, namespace=prompt.namespace,
            priority=prompt.priority, logprob_start=start, session="" if prompt.turn is None else prompt.turn.session.key,
        )
        detokenizer = None
        if self._tokenizer is not None:
            text = prompt.sampling.text
            detokenizer = self._tokenizer.detokenizer(text.skip_special_tokens, prompt.token_ids, text.markers)
        generation = Generation(index, prompt.name, request, wish, prompt.sampling.text, detokenizer)
        if prompt.sampling.max_new_tokens == 0:
            generation.without_output()
        if prompt.turn is not None:
            generation.follow(prompt.turn)
        return generation


def in_session(sessions: SessionBook, wish: Wish | None, prompts: Sequence[Prompt]) -> list[Prompt]:
    """With a wish: the one prompt behind what its session had before. Submit it before anything else is awaited. Raises a 400."""
    if wish is None:
        return list(prompts)
    if len(prompts) != 1 or prompts[0].sampling.num_choices != 1:
        raise bad_field("session_params", "needs one prompt and n = 1")
    (prompt,) = prompts
    turn = sessions.begin(wish, prompt.name, prompt.token_ids)
    return [replace(prompt, token_ids=turn.prompt(), turn=turn)]


def rids_of(fields: Fields, num_prompts: int, is_batch: bool) -> list[str]:
    """The client's names for its prompts, or random ones."""
    rid = fields.get("rid")
    if rid is None:
        return [f"{random.getrandbits(128):032x}" for _ in range(num_prompts)]
    if is_batch and isinstance(rid, str):
        return [check_rid(f"{check_rid(rid)}_{index}") for index in range(num_prompts)]
    return [check_rid(item) for item in per_item("rid", rid, num_prompts, is_batch)]


def namespaces_of(fields: Fields, num_prompts: int, is_batch: bool) -> list[str]:
    """Prefixes are shared inside one namespace only; lengths keep the parts apart."""
    salts = per_item("cache_salt", fields.get("cache_salt"), num_prompts, is_batch)
    extras = per_item("extra_key", fields.get("extra_key"), num_prompts, is_batch)
    return [tagged("salt", "cache_salt", salt) + tagged("extra", "extra_key", extra) for salt, extra in zip(salts, extras)]


def tagged(tag: str, name: str, value: object) -> str:
    if value is None or value == "":
        return ""
    if not isinstance(value, str):
        raise bad_field(name, "must be a string")
    return f"{tag}:{len(value)}:{value};"


def priority_of(fields: Fields) -> int:
    return fields.integer("priority", 0, -MAX_PRIORITY, MAX_PRIORITY)


def refuse_disaggregation(fields: Fields) -> None:
    """Hand-over fields may be there as nulls (or lists of nulls) only."""
    for name in BOOTSTRAP:
        value = fields.get(name)
        if value is not None and not (isinstance(value, list) and all(item is None for item in value)):
            raise bad_field(name, "is set, but this server does not run in a disaggregation mode")
    for name in ("routed_dp_rank", "data_parallel_rank"):
        fields.integer(name, 0, 0, 0)


def need_tokenizer(tokenizer: TextTokenizer | None, what: str) -> TextTokenizer:
    if tokenizer is None:
        raise ApiError(400, f"{what} needs a tokenizer, but the server was started with --skip-tokenizer-init: send input_ids to /generate", what)
    return tokenizer


def num_prompt_logprobs(prompt: Prompt) -> int:
    """Log probabilities of prompt tokens that all choices of the prompt bring."""
    wish = prompt.wish
    num_positions = len(prompt.token_ids) - wish.start if wish.start >= 0 else 0
    return num_positions * (1 + wish.num_top + len(wish.asked_ids)) * prompt.sampling.num_choices


def check_num_prompts(field: str, num_prompts: int) -> None:
    """Before any of them is tokenized."""
    if num_prompts > MAX_GENERATIONS:
        raise bad_field(field, f"has {num_prompts} prompts, more than {MAX_GENERATIONS}")
