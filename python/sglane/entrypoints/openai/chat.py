"""POST /v1/chat/completions."""
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from sglane.entrypoints.body import read_object
from sglane.entrypoints.engine_client import Job
from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.generation import Generation, LogprobWish
from sglane.entrypoints.openai.common import REFUSED, Head, Options, chat_logprobs, closing, ending, usage
from sglane.entrypoints.request_builder import Prompt, namespaces_of, need_tokenizer, priority_of, refuse_disaggregation, rids_of
from sglane.entrypoints.responses import EventStream, answer, due_generations, event
from sglane.entrypoints.sampling import OPENAI, parse_sampling
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields, kind_of

MAX_TOP_LOGPROBS = 20
#: Arguments of the template call that are not for the client.
RESERVED = {
    "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}


class ChatApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def complete(self, request: Request) -> Response:
        """Messages in, an assistant message out."""
        fields = Fields(await read_object(request))
        engine = self._server.engine_for_requests()
        refuse_unsupported(fields)
        tokenizer = need_tokenizer(engine.tokenizer, "messages")
        messages = read_messages(fields)
        sampling = parse_sampling(fields, OPENAI, engine.facts, None, self._server.args.stream_interval)
        if sampling.max_new_tokens == 0:
            raise bad_field("max_tokens" if fields.get("max_tokens") is not None else "max_completion_tokens", "must be at least 1, got 0")
        wish = read_wish(fields)
        options = Options.read(fields, self._server.args.enable_cache_report)
        head = Head.make("chatcmpl", "chat.completion.chunk" if options.stream else "chat.completion", fields, self._server.model_name)
        job = engine.client.open_job(rids_of(fields, 1, is_batch=False))
        try:
            await engine.check_grammars([sampling])
            ids = await tokenizer.encode_chat(messages, *read_turn(fields), read_template_arguments(fields))
            prompt = Prompt(job.names[0], ids, sampling, wish, namespaces_of(fields, 1, is_batch=False)[0], priority_of(fields), "messages")
            engine.builder.submit(job, [prompt], options.stream)
        except BaseException:
            job.close()
            raise
        writer = ChatWriter(head, options, tokenizer)
        if options.stream:
            return EventStream(job, lambda: writer.events(job))
        return await answer(request, job, writer.whole)


class ChatWriter:
    """Bodies and chunks of one chat answer."""

    def __init__(self, head: Head, options: Options, tokenizer: TextTokenizer):
        self._head = head
        self._options = options
        self._tokenizer = tokenizer

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        choices = []
        for generation in generations:
            message = {"role": "assistant", "content": generation.text, "reasoning_content": None, "tool_calls": None}
            logprobs = chat_logprobs(generation.output_logprobs, self._tokenizer) if generation.wish.output else None
            choices.append({"index": generation.index, "message": message, "logprobs": logprobs, **ending(generation.finish)})
        return self._head.body(choices, **closing(generations, self._options))

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """For each choice: its role, its text, one finish; then usage if it was asked for."""
        sent: dict[int, tuple[int, int]] = {}  # characters, log probability entries
        async for due in due_generations(job):
            chunks: list[bytes] = []
            for generation in due:
                if generation.index not in sent:
                    sent[generation.index] = (0, 0)
                    chunks.append(self._chunk(generation, {"role": "assistant", "content": ""}))
                num_characters, num_entries = sent[generation.index]
                text, entries = generation.text[num_characters:], generation.output_logprobs[num_entries:]
                sent[generation.index] = (len(generation.text), len(generation.output_logprobs))
                if text or (entries and generation.wish.output):
                    logprobs = chat_logprobs(entries, self._tokenizer) if generation.wish.output else None
                    chunks.append(self._chunk(generation, {"content": text}, logprobs))
                if generation.finish is not None:
                    chunks.append(self._chunk(generation, {}, finished=True))
            if chunks:
                yield b"".join(chunks)
        if self._options.include_usage:
            yield event(self._head.body([], **closing(job.generations, self._options)))

    def _chunk(self, generation: Generation, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finished: bool = False) -> bytes:
        delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None, **delta}
        choice = {"index": generation.index, "delta": delta, "logprobs": logprobs, **ending(generation.finish if finished else None)}
        more: dict[str, Any] = {}
        if self._options.continuous_usage:
            more["usage"] = usage([generation], self._options)
        elif self._options.include_usage:
            more["usage"] = None
        return event(self._head.body([choice], **more))


# --- reading -----------------------------------------------------------------------------------------------------------


def refuse_unsupported(fields: Fields) -> None:
    fields.refuse((*REFUSED, "tools", "functions", "function_call", "audio", "prediction", "web_search_options"))
    refuse_disaggregation(fields)
    if fields.get("tool_choice") not in (None, "none", "auto"):
        raise bad_field("tool_choice", "is not supported by this server")
    if fields.get("modalities") not in (None, ["text"]):
        raise bad_field("modalities", "must be [\"text\"]")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation with contents as plain strings."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "must be an array with at least one message")
    return [read_message(index, message) for index, message in enumerate(messages)]


def read_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_field("messages", f"[{index}] must be an object, not {kind_of(message)}")
    if not isinstance(message.get("role"), str):
        raise bad_field("messages", f"[{index}].role must be a string")
    read = {**message, "content": read_content(index, message.get("content"), may_be_null=bool(message.get("tool_calls")))}
    if message.get("tool_calls"):
        read["tool_calls"] = [read_tool_call(index, call) for call in message["tool_calls"]]
    return {key: value for key, value in read.items() if value is not None}


def read_content(index: int, content: Any, may_be_null: bool) -> str:
    """A string, or the texts of a list of parts."""
    if content is None and may_be_null:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_field("messages", f"[{index}].content must be a string or an array of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_field("messages", f"[{index}].content has a part that is not {{\"type\": \"text\", \"text\": ...}}; only text is supported")
        texts.append(part["text"])
    return " ".join(texts)


def read_tool_call(index: int, call: Any) -> dict[str, Any]:
    """A call in the history; templates want its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_field("messages", f"[{index}].tool_calls must hold function calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            pass  # the template gets the text
    return {**call, "function": {**function, "arguments": arguments}}


def read_turn(fields: Fields) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message); they exclude each other."""
    continue_final = fields.flag("continue_final_message")
    add_prompt = fields.flag("add_generation_prompt", not continue_final)
    if add_prompt and continue_final:
        raise bad_field("continue_final_message", "and add_generation_prompt exclude each other")
    return add_prompt, continue_final


def read_template_arguments(fields: Fields) -> dict[str, Any]:
    arguments = dict(fields.object("chat_template_kwargs"))
    reserved = RESERVED.intersection(arguments)
    if reserved:
        raise bad_field("chat_template_kwargs", f"must not hold {min(reserved)}")
    effort = fields.string("reasoning_effort")
    return arguments if effort is None else {"reasoning_effort": effort, **arguments}


def read_wish(fields: Fields) -> LogprobWish:
    num_top = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if not fields.flag("logprobs"):
        if num_top:
            raise bad_field("top_logprobs", "needs logprobs to be true")
        return LogprobWish()
    return LogprobWish(output=True, num_top=num_top)
