"""Parses of whole texts, in pieces of any size, as plain values."""
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglane.entrypoints.parsers.answer import AnswerParser
from sglane.entrypoints.parsers.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from sglane.entrypoints.parsers.reasoning import FORMATS as REASONING
from sglane.entrypoints.parsers.reasoning import ReasoningParser, opening
from sglane.entrypoints.parsers.tool_calls import FORMATS
from sglane.entrypoints.parsers.tool_calls.parser import ToolCallParser


@dataclass
class Parsed:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)  # (name, arguments)


@dataclass(frozen=True)
class Format:
    """Parsers for one kind of model. None: not used."""

    tool_calls: str | None
    reasoning: str | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt_end: str = ""

    def parser(self) -> AnswerParser:
        reasoning = None if self.reasoning is None else ReasoningParser(opening(REASONING[self.reasoning], self.prompt_end) == "inside")
        calls = None if self.tool_calls is None else ToolCallParser(FORMATS[self.tool_calls], self.tools)
        return AnswerParser(reasoning, calls, thoughts_are_text=False, stream_thoughts=True)

    def parse(self, pieces: Iterable[str], was_cut: bool = False) -> Parsed:
        parser = self.parser()
        events = [event for piece in pieces for event in parser.feed(piece)]
        return collect([*events, *parser.finish(was_cut)])


def collect(events: Iterable[Event]) -> Parsed:
    """Checks the order of the events of calls: start, pieces of arguments, end; indices from 0."""
    parsed, open_call, arguments = Parsed(), None, ""
    for event in events:
        if isinstance(event, CallStart):
            assert open_call is None and event.index == len(parsed.calls)
            open_call, arguments = event, ""
        elif isinstance(event, CallArguments):
            assert open_call is not None and event.index == open_call.index
            arguments += event.fragment
        elif isinstance(event, CallEnd):
            assert open_call is not None and event.index == open_call.index
            parsed.calls.append((open_call.name, json.loads(arguments)))
            open_call = None
        elif isinstance(event, Reasoning):
            assert event.text and not parsed.text and not parsed.calls
            parsed.reasoning += event.text
        elif isinstance(event, Text):
            assert event.text and open_call is None
            parsed.text += event.text
    assert open_call is None
    return parsed


def assert_chunking_is_irrelevant(form: Format, text: str, was_cut: bool = False) -> Parsed:
    """Every split into two, and character by character, give what the whole text gives."""
    whole = form.parse([text], was_cut)
    assert form.parse(text, was_cut) == whole, "character by character"
    for place in range(len(text) + 1):
        assert form.parse([text[:place], text[place:]], was_cut) == whole, f"split at {place}: {text[:place][-30:]!r}"
    return whole
