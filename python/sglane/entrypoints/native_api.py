"""POST /generate: SGLang's native route."""
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Request
from fastapi.responses import Response

from sglane.entrypoints.body import read_object
from sglane.entrypoints.engine_client import Job
from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.generation import Generation, LogprobWish
from sglane.entrypoints.meta_info import MetaInfo
from sglane.entrypoints.middleware import caller_of
from sglane.entrypoints.request_builder import (
    Prompt,
    check_num_prompts,
    in_session,
    namespaces_of,
    need_tokenizer,
    priority_of,
    refuse_disaggregation,
    rids_of,
)
from sglane.entrypoints.responses import EventStream, answer, due_generations, event
from sglane.entrypoints.sampling import NATIVE, ModelFacts, Sampling, parse_sampling
from sglane.entrypoints.server_state import Engine, ServerState
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields, check_integer, kind_of, per_item, token_ids

DEFAULT_MAX_NEW_TOKENS = 128
MAX_TOP_LOGPROBS = 1024
REFUSED = (
    "input_embeds", "image_data", "video_data", "audio_data", "modalities", "lora_path", "lora_id", "session_id",
    "custom_logit_processor", "return_hidden_states", "return_routed_experts", "return_bytes", "return_entropy",
    "require_reasoning", "max_thinking_tokens", "background",
)


@dataclass(frozen=True)
class Inputs:
    """What stands in for the prompt: texts or lists of token ids, one or a batch."""

    field: str  # text or input_ids
    values: Sequence[Any]
    is_batch: bool


class NativeApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def generate(self, request: Request) -> Response:
        """Text or token ids in, text and token ids out; one object, or a list for a batch or several choices."""
        received_s = time.monotonic()
        fields = Fields(await read_object(request))
        engine = self._server.engine_for_requests()
        fields.refuse(REFUSED)
        refuse_disaggregation(fields)
        inputs = read_inputs(fields)
        samplings = read_samplings(fields, inputs, engine.facts, self._server.args.stream_interval)
        wishes = read_wishes(fields, inputs, engine.facts)
        for sampling, wish in zip(samplings, wishes):
            if engine.tokenizer is None and (sampling.text.stops or sampling.text.stop_patterns or wish.with_text):
                need_tokenizer(None, text_field(sampling))
        stream = fields.flag("stream")
        job = engine.client.open_job(rids_of(fields, len(inputs.values), inputs.is_batch), caller_of(request))
        try:
            await self._submit(engine, job, fields, inputs, (samplings, wishes), stream)
        except BaseException:
            job.close()
            raise
        is_list = inputs.is_batch or len(job.generations) > 1
        writer = AnswerWriter(engine.tokenizer, received_s, is_list=is_list, with_prompt_ids=fields.flag("return_prompt_token_ids"),
                              is_incremental=self._server.args.incremental_streaming_output)
        if stream:
            return EventStream(job, lambda: writer.events(job))
        return await answer(request, job, writer.whole)

    async def _submit(self, engine: Engine, job: Job, fields: Fields, inputs: Inputs, parsed: tuple[list[Sampling], list[LogprobWish]],
                      stream: bool) -> None:
        session = engine.sessions.wish_of(fields)
        await engine.check_grammars(parsed[0])
        namespaces = namespaces_of(fields, len(inputs.values), inputs.is_batch)
        priority = priority_of(fields)
        prompts = []
        for name, ids, sampling, wish, namespace in zip(job.names, await tokens_of(engine, inputs), *parsed, namespaces):
            prompts.append(Prompt(name, ids, sampling, wish, namespace, priority, inputs.field))
        engine.builder.submit(job, in_session(engine.sessions, session, prompts), stream)


def text_field(sampling: Sampling) -> str:
    """The field that makes a tokenizer necessary."""
    return "stop" if sampling.text.stops else "stop_regex" if sampling.text.stop_patterns else "return_text_in_logprobs"


def read_inputs(fields: Fields) -> Inputs:
    """Exactly one of text and input_ids; either may be a batch."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if (text is None) == (ids is None):
        raise bad_field("text", "or input_ids is needed, not both" if text is not None else "or input_ids is needed")
    if text is not None:
        if isinstance(text, str):
            return Inputs("text", [text], False)
        if not isinstance(text, list) or not all(isinstance(item, str) for item in text):
            raise bad_field("text", f"must be a string or an array of strings, not {kind_of(text)}")
        return not_empty(Inputs("text", text, True))
    if not isinstance(ids, list):
        raise bad_field("input_ids", f"must be an array of token ids, not {kind_of(ids)}")
    if ids and isinstance(ids[0], list):
        return not_empty(Inputs("input_ids", ids, True))
    return not_empty(Inputs("input_ids", [ids] if ids else [], False))


def not_empty(inputs: Inputs) -> Inputs:
    if not inputs.values:
        raise bad_field(inputs.field, "must not be empty")
    check_num_prompts(inputs.field, len(inputs.values))
    return inputs


async def tokens_of(engine: Engine, inputs: Inputs) -> list[npt.NDArray[np.int32]]:
    """Token ids of every prompt."""
    if inputs.field == "input_ids":
        return [token_ids(inputs.field, value, engine.facts.vocab_size) for value in inputs.values]
    if not all(inputs.values):
        raise bad_field(inputs.field, "must not be empty")
    return await need_tokenizer(engine.tokenizer, inputs.field).encode_texts(inputs.values)


def read_samplings(fields: Fields, inputs: Inputs, facts: ModelFacts, stream_interval: int) -> list[Sampling]:
    """One for each prompt; a shared object is read once."""
    values = per_item("sampling_params", fields.get("sampling_params"), len(inputs.values), inputs.is_batch)
    read: dict[int, Sampling] = {}
    for value in values:
        if value is not None and not isinstance(value, dict):
            raise bad_field("sampling_params", f"must be an object, not {kind_of(value)}")
        if id(value) not in read:
            read[id(value)] = parse_sampling(Fields(value or {}), NATIVE, facts, DEFAULT_MAX_NEW_TOKENS, stream_interval)
    return [read[id(value)] for value in values]


def read_wishes(fields: Fields, inputs: Inputs, facts: ModelFacts) -> list[LogprobWish]:
    """Log probability fields, one value for all prompts or a list with one for each."""
    with_text = fields.flag("return_text_in_logprobs")

    def each(name: str) -> Sequence[Any]:
        return per_item(name, fields.get(name), len(inputs.values), inputs.is_batch)

    asked = fields.get("token_ids_logprob")
    is_nested = isinstance(asked, list) and bool(asked) and all(item is None or isinstance(item, list) for item in asked)
    asked_ids = each("token_ids_logprob") if is_nested else [asked] * len(inputs.values)
    wishes = []
    for output, start, num_top, ids in zip(each("return_logprob"), each("logprob_start_len"), each("top_logprobs_num"), asked_ids):
        wish = LogprobWish(
            output=Fields({"return_logprob": output}).flag("return_logprob"),
            start=check_integer("logprob_start_len", start, -1, -1, facts.max_request_tokens),
            num_top=check_integer("top_logprobs_num", num_top, 0, 0, min(MAX_TOP_LOGPROBS, facts.vocab_size)),
            asked_ids=read_asked(ids, facts),
            with_text=with_text,
        )
        wishes.append(wish if wish.output else LogprobWish())
    return wishes


def read_asked(value: Any, facts: ModelFacts) -> list[int]:
    """Token ids whose log probabilities are asked for at every position."""
    ids = Fields({"token_ids_logprob": value}).token_list("token_ids_logprob", facts.vocab_size)
    if len(ids) > MAX_TOP_LOGPROBS:
        raise bad_field("token_ids_logprob", f"has {len(ids)} token ids, more than {MAX_TOP_LOGPROBS}")
    return ids


class AnswerWriter:
    """Bodies and events of the native route."""

    def __init__(self, tokenizer: TextTokenizer | None, received_s: float, *, is_list: bool, with_prompt_ids: bool, is_incremental: bool):
        """is_incremental: `text` and `output_ids` of an event are what is new since the last one; else they are all there is so far."""
        self._tokenizer = tokenizer
        self._meta = MetaInfo(tokenizer, received_s)
        self._is_list = is_list
        self._with_prompt_ids = with_prompt_ids
        self._is_incremental = is_incremental

    def whole(self, generations: list[Generation]) -> Any:
        bodies = [self.body(generation) for generation in generations]
        return bodies if self._is_list else bodies[0]

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        sent: dict[int, tuple[int, int]] = {}  # characters, tokens
        async for due in due_generations(job):
            bodies = []  # all at once: a generation may go on while we write
            for generation in due:
                bodies.append((generation.index, self.body(generation, *sent.get(generation.index, (0, 0)))))
                if self._is_incremental:
                    sent[generation.index] = (len(generation.text), generation.num_output_tokens)
            yield b"".join(event({**body, "index": index} if self._is_list else body) for index, body in bodies)

    def body(self, generation: Generation, num_characters: int = 0, num_tokens: int = 0) -> dict[str, Any]:
        """State of one generation so far, without the first characters and output tokens."""
        prompt_ids = {"prompt_token_ids": generation.prompt_ids()} if self._with_prompt_ids else {}
        body: dict[str, Any] = {"output_ids": generation.output_ids[num_tokens:], "meta_info": self._meta.of(generation), **prompt_ids}
        return body if self._tokenizer is None else {"text": generation.text[num_characters:], **body}
