"""POST /v1/chat/completions."""
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Request
from fastapi.responses import Response

from sglane.entrypoints.body import read_object
from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.generation import LogprobWish
from sglane.entrypoints.middleware import caller_of
from sglane.entrypoints.openai.chat_writer import ChatWriter, Reading
from sglane.entrypoints.openai.common import REFUSED, Head, Options
from sglane.entrypoints.openai.messages import read_messages
from sglane.entrypoints.openai.parsing import Parsing, check_template
from sglane.entrypoints.request_builder import Prompt, in_session, namespaces_of, need_tokenizer, priority_of, refuse_disaggregation, rids_of
from sglane.entrypoints.responses import EventStream, answer
from sglane.entrypoints.sampling import OPENAI, ModelFacts, Sampling, parse_sampling
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.validation import Fields, token_ids

MAX_TOP_LOGPROBS = 20
#: Tokens at the end of a prompt in which a marker may stand.
NUM_END_TOKENS = 16
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
        given = read_ids(fields, engine.facts)
        messages = read_messages(fields) if given is None else []
        parsing = Parsing.read(fields, self._server.args)
        if given is None:
            check_template(parsing.tools, tokenizer)
        sampling = self._sampling(fields, engine.facts, parsing)
        session = engine.sessions.wish_of(fields)
        wish, turn, arguments = read_wish(fields), read_turn(fields), read_template_arguments(fields)
        options = Options.read(fields, self._server.args.enable_cache_report)
        head = Head.make("chatcmpl", "chat.completion.chunk" if options.stream else "chat.completion", fields, self._server.model_name)
        job = engine.client.open_job(rids_of(fields, 1, is_batch=False), caller_of(request))
        try:
            ids = await tokenizer.encode_chat(messages, *turn, {**arguments, "tools": parsing.tools.declared}) if given is None else given
            opening = parsing.opening(tokenizer.decode(ids[-NUM_END_TOKENS:]), messages, continue_final_message=turn[1])
            sampling = sampling.after_thoughts(opening)
            await engine.check_grammars([sampling])
            prompt = Prompt(job.names[0], ids, sampling, wish, namespaces_of(fields, 1, is_batch=False)[0], priority_of(fields),
                            "messages" if given is None else "input_ids")
            engine.builder.submit(job, in_session(engine.sessions, session, [prompt]), options.stream)
        except BaseException:
            job.close()
            raise
        writer = ChatWriter(head, options, Reading(parsing, opening == "inside", tokenizer))
        if options.stream:
            return EventStream(job, lambda: writer.events(job))
        return await answer(request, job, writer.whole)

    def _sampling(self, fields: Fields, facts: ModelFacts, parsing: Parsing) -> Sampling:
        sampling = parse_sampling(fields, OPENAI, facts, None, self._server.args.stream_interval, parsing.tools.needed)
        if sampling.max_new_tokens == 0:
            raise bad_field("max_tokens" if fields.get("max_tokens") is not None else "max_completion_tokens", "must be at least 1, got 0")
        markers = tuple(dict.fromkeys([*sampling.text.markers, *parsing.markers]))
        return dataclasses.replace(sampling, text=dataclasses.replace(sampling.text, markers=markers))


# --- reading -----------------------------------------------------------------------------------------------------------


def refuse_unsupported(fields: Fields) -> None:
    fields.refuse((*REFUSED, "functions", "function_call", "audio", "prediction", "web_search_options"))
    refuse_disaggregation(fields)
    if fields.get("modalities") not in (None, ["text"]):
        raise bad_field("modalities", "must be [\"text\"]")


def read_ids(fields: Fields, facts: ModelFacts) -> npt.NDArray[np.int32] | None:
    """`input_ids`: the prompt as token ids, int32 [n]. Messages are not looked at then, and what would shape them is refused."""
    value = fields.get("input_ids")
    if value is None:
        return None
    fields.refuse(("continue_final_message", "add_generation_prompt", "chat_template_kwargs", "reasoning_effort"),
                  "shapes the prompt, but input_ids gives it as it is")
    return token_ids("input_ids", value, facts.vocab_size)


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
