"""POST /v1/completions."""
from collections.abc import AsyncIterator, Sequence
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
from sglane.entrypoints.openai.common import REFUSED, Head, Ids, Options, closing, completion_logprobs, ending, extension, usage
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
from sglane.entrypoints.sampling import OPENAI, parse_sampling
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields, token_ids

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 100


class CompletionsApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def complete(self, request: Request) -> Response:
        """One prompt or a list of them (text or token ids) in, their continuations out."""
        fields = Fields(await read_object(request))
        engine = self._server.engine_for_requests()
        refuse_unsupported(fields)
        tokenizer = need_tokenizer(engine.tokenizer, "prompt")
        values, is_batch = read_prompts(fields)
        sampling = parse_sampling(fields, OPENAI, engine.facts, DEFAULT_MAX_TOKENS, self._server.args.stream_interval)
        echo = fields.flag("echo")
        session = engine.sessions.wish_of(fields)
        if session is not None and echo:
            raise bad_field("echo", "is not for a request of a session, whose prompt begins with what was before")
        wish = read_wish(fields, echo)
        options = Options.read(fields, self._server.args.enable_cache_report)
        head = Head.make("cmpl", "text_completion", fields, self._server.model_name)
        job = engine.client.open_job(rids_of(fields, len(values), is_batch), caller_of(request))
        try:
            await engine.check_grammars([sampling])
            prompts, texts = [], {}
            priority = priority_of(fields)
            token_ids_of = await tokens_of(tokenizer, values, engine.facts.vocab_size)
            for name, value, ids, namespace in zip(job.names, values, token_ids_of, namespaces_of(fields, len(values), is_batch)):
                prompts.append(Prompt(name, ids, sampling, wish, namespace, priority, "prompt"))
                texts[name] = (value if isinstance(value, str) else tokenizer.decode(ids)) if echo else ""
            engine.builder.submit(job, in_session(engine.sessions, session, prompts), options.stream)
        except BaseException:
            job.close()
            raise
        writer = CompletionWriter(head, options, tokenizer, texts)
        if options.stream:
            return EventStream(job, lambda: writer.events(job))
        return await answer(request, job, writer.whole)


class CompletionWriter:
    """Bodies and chunks of one answer. echoes: text in front of each prompt's continuation, by rid."""

    def __init__(self, head: Head, options: Options, tokenizer: TextTokenizer, echoes: dict[str, str]):
        self._head = head
        self._options = options
        self._tokenizer = tokenizer
        self._echoes = echoes

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        choices = []
        for generation in generations:
            entries = [*generation.input_logprobs, *generation.output_logprobs]
            logprobs = completion_logprobs(entries, self._tokenizer, 0) if generation.wish.output else None
            text = self._echoes[generation.name] + generation.text
            more = {**ending(generation.finish), **Ids(generation, self._options).fields(), **self._meta(generation)}
            choices.append({"index": generation.index, "text": text, "logprobs": logprobs, **more})
        return self._head.body(choices, **closing(generations, self._options))

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """Every chunk but the usage chunk has one choice; each choice has one finish."""
        sent: dict[int, tuple[int, int]] = {}  # characters of echo and text, log probability entries
        ids: dict[int, Ids] = {}
        async for due in due_generations(job):
            chunks: list[bytes] = []
            for generation in due:
                num_characters, num_entries = sent.get(generation.index, (0, 0))
                whole_text = self._echoes[generation.name] + generation.text
                entries = [*generation.input_logprobs, *generation.output_logprobs][num_entries:] if generation.wish.output else []
                text = whole_text[num_characters:]
                sent[generation.index] = (len(whole_text), num_entries + len(entries))
                if text or entries or generation.finish is not None:
                    logprobs = completion_logprobs(entries, self._tokenizer, num_characters) if entries else None
                    unsent = ids.setdefault(generation.index, Ids(generation, self._options))
                    chunks.append(self._chunk(generation, text, logprobs, unsent.fields()))
            if chunks:
                yield b"".join(chunks)
        if self._options.include_usage:
            yield event(self._head.body([], **closing(job.generations, self._options)))

    def _meta(self, generation: Generation) -> dict[str, Any]:
        return {"meta_info": MetaInfo(self._tokenizer, self._head.received_s).of(generation)} if self._options.meta_info else {}

    def _chunk(self, generation: Generation, text: str, logprobs: dict[str, Any] | None, ids: dict[str, Any]) -> bytes:
        choice = {"index": generation.index, "text": text, "logprobs": logprobs, **ending(generation.finish), **ids}
        if generation.finish is not None:
            choice |= self._meta(generation)
        more = extension([generation], self._options) if generation.finish is not None else {}
        if self._options.continuous_usage:
            more["usage"] = usage([generation], self._options)
        elif self._options.include_usage:
            more["usage"] = None
        return event(self._head.body([choice], **more))


# --- reading -----------------------------------------------------------------------------------------------------------


def refuse_unsupported(fields: Fields) -> None:
    fields.refuse((*REFUSED, "suffix", "input_ids"))
    refuse_disaggregation(fields)


def read_prompts(fields: Fields) -> tuple[Sequence[Any], bool]:
    """(prompts, whether they came as a batch). A prompt is a string or a list of token ids."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "must be a string, an array of token ids, or a non-empty array of one of these")
    if isinstance(prompt[0], str | list):
        if not all(isinstance(item, type(prompt[0])) for item in prompt):
            raise bad_field("prompt", "must not mix texts and token ids")
        check_num_prompts("prompt", len(prompt))
        return prompt, True
    return [prompt], False


async def tokens_of(tokenizer: TextTokenizer, values: Sequence[Any], vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """Token ids of every prompt."""
    if not isinstance(values[0], str):
        return [token_ids("prompt", value, vocab_size) for value in values]
    if not all(values):
        raise bad_field("prompt", "must not be empty")
    return await tokenizer.encode_texts(values)


def read_wish(fields: Fields, echo: bool) -> LogprobWish:
    if fields.get("logprobs") is None:
        return LogprobWish()
    return LogprobWish(output=True, start=0 if echo else -1, num_top=fields.integer("logprobs", 0, 0, MAX_LOGPROBS))
