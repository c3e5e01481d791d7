"""DeepSeek V3.1: calls `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` between two markers of their own."""
from sglane.entrypoints.parsers.cursor import Cursor
from sglane.entrypoints.parsers.tool_calls.format import CallReading, Template, Tools, call_of, parse_json

CALLS_OPEN, CALLS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV31:
    openers = (CALLS_OPEN, OPEN)  # the second one for calls that follow a malformed one
    markers = (CALLS_OPEN, CALLS_CLOSE, OPEN, SEPARATOR, CLOSE)
    template = Template(lambda name: f"{OPEN}{name}{SEPARATOR}", CLOSE, frame=(CALLS_OPEN, CALLS_CLOSE))

    def read(self, cursor: Cursor, tools: Tools, opener: str) -> CallReading:
        if opener == CALLS_OPEN:
            yield from cursor.space()
            yield from cursor.expect(OPEN)
        marker = OPEN
        while marker == OPEN:
            yield from cursor.space()
            name = yield from cursor.name(tools)
            yield from cursor.space()
            yield from cursor.expect(SEPARATOR)
            yield from cursor.space()
            arguments = yield from cursor.json_object()
            yield from cursor.space()
            yield from cursor.expect(CLOSE)
            yield call_of(name, parse_json(arguments))
            yield from cursor.space()
            marker = yield from cursor.expect(OPEN, CALLS_CLOSE)
