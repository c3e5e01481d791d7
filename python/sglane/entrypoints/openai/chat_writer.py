"""Bodies and chunks of one chat answer: what parsers made of the text, in OpenAI's shapes. A stream adds up to the body."""
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglane.entrypoints.engine_client import Job
from sglane.entrypoints.generation import Finish, Generation
from sglane.entrypoints.meta_info import MetaInfo
from sglane.entrypoints.openai.common import Head, Ids, Options, chat_logprobs, closing, ending, extension, usage
from sglane.entrypoints.openai.parsing import Parsing
from sglane.entrypoints.parsers.answer import join
from sglane.entrypoints.parsers.counter import ReasoningCounter
from sglane.entrypoints.parsers.events import CallArguments, CallStart, Event, Reasoning, Text
from sglane.entrypoints.responses import due_generations, event
from sglane.entrypoints.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Reading:
    """How the text of an answer is read. begins_inside: the prompt has begun the thoughts."""

    parsing: Parsing
    begins_inside: bool
    tokenizer: TextTokenizer


class Choice:
    """One generation and what was read of it so far."""

    def __init__(self, generation: Generation, reading: Reading, options: Options):
        self.generation = generation
        self.ids = Ids(generation, options)
        self._tokenizer = reading.tokenizer
        self._parser = reading.parsing.answer(reading.begins_inside)
        self._counter = make_counter(generation, reading)
        self._num_characters = 0
        self._num_entries = 0  # of log probabilities
        self._num_calls = 0

    def events(self) -> list[Event]:
        """What is new."""
        generation = self.generation
        piece = generation.text[self._num_characters :]
        self._num_characters += len(piece)
        events = self._parser.feed(piece) if piece else []
        if generation.finish is not None:
            events = [*events, *self._parser.finish(was_cut(generation.finish))]
        self._num_calls += sum(isinstance(item, CallStart) for item in events)
        return join(events)

    def logprobs(self) -> dict[str, Any] | None:
        """New entries; None if there are none or they were not asked for."""
        entries = self.generation.output_logprobs[self._num_entries :]
        self._num_entries += len(entries)
        return chat_logprobs(entries, self._tokenizer) if entries and self.generation.wish.output else None

    def ending(self) -> dict[str, Any]:
        """finish_reason (`tool_calls` if there was a complete call) and matched_stop."""
        finish = self.generation.finish
        end = ending(finish)
        if finish is not None and finish.kind != "abort" and self._num_calls:
            end["finish_reason"] = "tool_calls"
        return end

    def num_reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.count(self.generation.output_ids)


def was_cut(finish: Finish) -> bool:
    """Whether something else than the model ended the text."""
    return finish.kind != "stop" or isinstance(finish.matched, str)


def make_counter(generation: Generation, reading: Reading) -> ReasoningCounter | None:
    parser = reading.parsing.reasoning(reading.begins_inside)
    if parser is None:
        return None
    prompt = np.frombuffer(generation.request.input_ids, np.int32)
    return ReasoningCounter(parser, reading.tokenizer.detokenizer(False, prompt))


def call_name() -> str:
    return f"call_{random.getrandbits(96):024x}"


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """A whole message. content is null when there are calls and no text."""
    texts = "".join(item.text for item in events if isinstance(item, Text))
    thoughts = "".join(item.text for item in events if isinstance(item, Reasoning))
    calls: list[dict[str, Any]] = [{"id": call_name(), "index": item.index, "type": "function", "function": {"name": item.name, "arguments": ""}}
             for item in events if isinstance(item, CallStart)]
    for item in events:
        if isinstance(item, CallArguments):
            calls[item.index]["function"]["arguments"] += item.fragment
    return {"role": "assistant", "content": texts or (None if calls else ""), "reasoning_content": thoughts or None, "tool_calls": calls or None}


def delta_of(item: Event) -> dict[str, Any]:
    """One event as a delta. A call's name comes first, its arguments follow."""
    if isinstance(item, Text):
        return {"content": item.text}
    if isinstance(item, Reasoning):
        return {"reasoning_content": item.text}
    if isinstance(item, CallStart):
        call = {"index": item.index, "id": call_name(), "type": "function", "function": {"name": item.name, "arguments": ""}}
        return {"tool_calls": [call]}
    assert isinstance(item, CallArguments), item
    return {"tool_calls": [{"index": item.index, "function": {"arguments": item.fragment}}]}


class ChatWriter:
    def __init__(self, head: Head, options: Options, reading: Reading):
        self._head = head
        self._options = options
        self._reading = reading

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        choices = [Choice(generation, self._reading, self._options) for generation in generations]
        parts = []
        for choice in choices:
            generation = choice.generation
            logprobs = chat_logprobs(generation.output_logprobs, self._reading.tokenizer) if generation.wish.output else None
            message = message_of(choice.events())
            parts.append({"index": generation.index, "message": message, "logprobs": logprobs, **choice.ending(), **choice.ids.fields(),
                          **self._meta(choice)})
        end = closing(generations, self._options, sum(choice.num_reasoning_tokens() for choice in choices))
        return self._head.body(parts, **self._prompt_ids(generations[0]), **end)

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """For each choice: its role, what was read of it, one finish; then usage if it was asked for."""
        choices: dict[int, Choice] = {}
        async for due in due_generations(job):
            chunks: list[bytes] = []
            for generation in due:
                if generation.index not in choices:
                    choices[generation.index] = Choice(generation, self._reading, self._options)
                    more = {} if len(choices) > 1 else self._prompt_ids(generation)
                    chunks.append(self._chunk(choices[generation.index], {"role": "assistant", "content": ""}, **more))
                choice = choices[generation.index]
                deltas, logprobs = [delta_of(item) for item in choice.events()], choice.logprobs()
                if logprobs is not None and not deltas:
                    deltas = [{"content": ""}]
                for place, delta in enumerate(deltas):
                    chunks.append(self._chunk(choice, delta, logprobs if place == 0 else None))
                if generation.finish is not None:
                    chunks.append(self._chunk(choice, {}, finished=True))
            if chunks:
                yield b"".join(chunks)
        if self._options.include_usage:
            num_reasoning_tokens = sum(choice.num_reasoning_tokens() for choice in choices.values())
            yield event(self._head.body([], **closing(job.generations, self._options, num_reasoning_tokens)))

    def _prompt_ids(self, generation: Generation) -> dict[str, Any]:
        """Of the whole answer, as vLLM's clients look for them; choices have them, too."""
        return {"prompt_token_ids": generation.prompt_ids()} if self._options.token_ids else {}

    def _meta(self, choice: Choice) -> dict[str, Any]:
        if not self._options.meta_info:
            return {}
        meta = MetaInfo(self._reading.tokenizer, self._head.received_s)
        return {"meta_info": meta.of(choice.generation, choice.num_reasoning_tokens())}

    def _chunk(self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finished: bool = False, **more: Any) -> bytes:
        delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None, **delta}
        end = choice.ending() if finished else ending(None)
        part = {"index": choice.generation.index, "delta": delta, "logprobs": logprobs, **end, **choice.ids.fields()}
        if finished:
            part |= self._meta(choice)
            more |= extension([choice.generation], self._options)
        if self._options.continuous_usage:
            more["usage"] = usage([choice.generation], self._options, choice.num_reasoning_tokens())
        elif self._options.include_usage:
            more["usage"] = None
        return event(self._head.body([part], **more))
