"""GLM 4.5, 4.7 and 5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, with or without line breaks between."""
from collections.abc import Generator
from typing import Any

from sglane.entrypoints.parsers.cursor import SPACE, Cursor, Malformed, OutOfText
from sglane.entrypoints.parsers.tool_calls.format import CallReading, Template, Tools, call_of
from sglane.entrypoints.parsers.tool_calls.schema import typed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE, VALUE_CLOSE = "<arg_value>", "</arg_value>"


class Glm:
    openers = (OPEN,)
    markers = (OPEN, CLOSE, KEY, KEY_CLOSE, VALUE, VALUE_CLOSE)

    def __init__(self, between: str = ""):
        """between: what the model writes between two calls; when reading, any white space will do."""
        self.template = Template(lambda name: f"{OPEN}{name}", CLOSE, "glm_xml", between=between)

    def read(self, cursor: Cursor, tools: Tools, opener: str) -> CallReading:
        yield from cursor.space()
        name = yield from cursor.name(tools)
        arguments: dict[str, Any] = {}
        while True:
            yield from cursor.space()
            if (yield from cursor.expect(KEY, CLOSE)) == CLOSE:
                break
            key = (yield from cursor.text_until(KEY_CLOSE))[0].strip(SPACE)
            yield from cursor.space()
            yield from cursor.expect(VALUE)
            value, is_last = yield from read_value(cursor)
            if key in arguments:
                raise Malformed
            arguments[key] = typed(value, tools[name], key)
            if is_last:
                break
        yield call_of(name, arguments)


def read_value(cursor: Cursor) -> Generator[None, None, tuple[str, bool]]:
    """(value, whether the end of the call was read with it). Models forget the last value's end marker now and then."""
    parts: list[str] = []
    try:
        yield from cursor.until(VALUE_CLOSE, sink=parts.append)
    except OutOfText:
        text = "".join(parts).rstrip(SPACE)
        if cursor.was_cut or not text.endswith(CLOSE):
            raise
        return text.removesuffix(CLOSE), True
    return "".join(parts), False
