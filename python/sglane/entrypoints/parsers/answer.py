"""One answer's text -> thoughts, text and tool calls."""
from sglane.entrypoints.parsers.events import CallEnd, CallStart, Event, Reasoning, Text
from sglane.entrypoints.parsers.reasoning import ReasoningParser
from sglane.entrypoints.parsers.tool_calls.parser import ToolCallParser


class AnswerParser:
    """Thoughts are taken off first; calls are looked for in what follows them."""

    def __init__(self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | None, thoughts_are_text: bool, stream_thoughts: bool):
        """stream_thoughts False: thoughts come out together, once they have ended."""
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._thoughts_are_text = thoughts_are_text
        self._stream_thoughts = stream_thoughts
        self._held_thoughts = ""

    def feed(self, piece: str) -> list[Event]:
        """What is certain after this piece."""
        thoughts, answer = ("", piece) if self._reasoning is None else self._reasoning.feed(piece)
        return [*self._think(thoughts, has_ended=bool(answer)), *self._say(answer)]

    def finish(self, was_cut: bool) -> list[Event]:
        """What was held. was_cut: the model did not end the text by itself."""
        thoughts, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        events = [*self._think(thoughts, has_ended=True), *self._say(answer)]
        return events if self._tool_calls is None else [*events, *self._tool_calls.finish(was_cut)]

    def _think(self, thoughts: str, has_ended: bool) -> list[Event]:
        self._held_thoughts += thoughts
        if not self._held_thoughts or not (self._stream_thoughts or has_ended):
            return []
        thoughts, self._held_thoughts = self._held_thoughts, ""
        return [Text(thoughts) if self._thoughts_are_text else Reasoning(thoughts)]

    def _say(self, answer: str) -> list[Event]:
        if not answer:
            return []
        return [Text(answer)] if self._tool_calls is None else self._tool_calls.feed(answer)


def join(events: list[Event]) -> list[Event]:
    """The same events with neighbours of one kind put together; ends of calls say nothing to a client and are left out."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        elif not isinstance(event, CallEnd):
            joined.append(event)
    return joined


def has_call(events: list[Event]) -> bool:
    return any(isinstance(event, CallStart) for event in events)
