"""Splits an answer into text and tool calls, piece by piece, for any format.

A call comes out when it is complete, never before: what turns out to be no call is text, and a call that was cut off must not be executed.
"""
from sglane.entrypoints.parsers.cursor import SPACE, Cursor, Malformed, OutOfText, Reading
from sglane.entrypoints.parsers.events import CallArguments, CallEnd, CallStart, Event, Text
from sglane.entrypoints.parsers.tool_calls.format import Call, Format, Tools


class ToolCallParser:
    """White space beside a call belongs to nothing, unless text stands on both sides."""

    def __init__(self, form: Format, tools: Tools, max_calls: int | None = None):
        """max_calls: further calls are left out."""
        self._form = form
        self._tools = tools
        self._max_calls = max_calls
        self._cursor = Cursor()
        self._events: list[Event] = []
        self._num_calls = 0
        self._space = ""  # after the last text
        self._has_text = False
        self._follows_call = False
        self._machine = self._run()
        next(self._machine)

    def feed(self, piece: str) -> list[Event]:
        """What is certain after this piece."""
        self._cursor.push(piece)
        self._machine.send(None)
        return self._given()

    def finish(self, was_cut: bool) -> list[Event]:
        """What was held. An unfinished call is text, or nothing when the output was cut off inside it. Nothing may be fed afterwards."""
        self._cursor.end(was_cut)
        self._machine.send(None)
        if self._space and not self._follows_call:
            self._events.append(Text(self._space))
        return self._given()

    def _given(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _run(self) -> Reading:
        yield
        try:
            while True:
                opener = yield from self._cursor.until(*self._form.openers, sink=self._add_text)
                yield from self._read_calls(opener)
        except OutOfText:
            unread = self._cursor.take_all()  # first: what is unread here has been part of an opener at most
            self._add_text(unread)
        yield

    def _read_calls(self, opener: str) -> Reading:
        """Calls after an opener; what is none becomes text."""
        self._cursor.mark(opener)
        try:
            for call in self._form.read(self._cursor, self._tools, opener):
                if call is None:
                    yield
                else:
                    self._add_call(call)
                    self._cursor.mark()
            self._cursor.unmark()
        except Malformed:
            self._add_text(self._cursor.unmark())
        except OutOfText:
            self._cursor.take_all()
            unfinished = self._cursor.unmark()
            if self._cursor.was_cut:
                self._follows_call = True  # for the white space in front of it
            else:
                self._add_text(unfinished)
            raise

    def _add_call(self, call: Call) -> None:
        index = self._num_calls
        if self._max_calls is not None and index >= self._max_calls:
            return
        self._num_calls += 1
        self._follows_call = True
        self._events += [CallStart(index, call.name), CallArguments(index, call.arguments), CallEnd(index)]

    def _add_text(self, text: str) -> None:
        """White space waits until more text follows."""
        text = self._space + text
        body = text.rstrip(SPACE)
        self._space = text[len(body) :]
        if not body:
            return
        if self._follows_call and not self._has_text:
            body = body.lstrip(SPACE)
        self._has_text, self._follows_call = True, False
        self._events.append(Text(body))
