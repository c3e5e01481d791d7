"""DeepSeek V3.2 (DSML): `<｜DSML｜invoke name="NAME">` blocks of parameters, all inside `<｜DSML｜function_calls>`."""
from collections.abc import Generator
from typing import Any

from sglane.entrypoints.parsers.cursor import Cursor, Malformed
from sglane.entrypoints.parsers.tool_calls.format import CallReading, Template, Tools, call_of, parse_json

CALLS_OPEN, CALLS_CLOSE = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
INVOKE, INVOKE_CLOSE = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
PARAMETER, PARAMETER_CLOSE = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
IS_STRING, IS_JSON = '" string="true">', '" string="false">'


class Dsml:
    openers = (CALLS_OPEN, INVOKE)  # the second one for calls that follow a malformed one
    markers = (CALLS_OPEN, CALLS_CLOSE, INVOKE, INVOKE_CLOSE, PARAMETER, PARAMETER_CLOSE)
    template = Template(lambda name: f'{INVOKE}{name}">\n', f"{INVOKE_CLOSE}\n", "deepseek_xml", (f"{CALLS_OPEN}\n", CALLS_CLOSE))

    def read(self, cursor: Cursor, tools: Tools, opener: str) -> CallReading:
        if opener == CALLS_OPEN:
            yield from cursor.space()
            yield from cursor.expect(INVOKE)
        marker = INVOKE
        while marker == INVOKE:
            name = yield from cursor.expect(*(f'{name}"' for name in tools))
            arguments: dict[str, Any] = {}
            if (yield from cursor.expect(">", "/>")) == ">":
                arguments = yield from read_parameters(cursor)
            yield call_of(name.removesuffix('"'), arguments)
            yield from cursor.space()
            marker = yield from cursor.expect(INVOKE, CALLS_CLOSE)


def read_parameters(cursor: Cursor) -> Generator[None, None, dict[str, Any]]:
    """Up to the end of the call."""
    arguments: dict[str, Any] = {}
    while True:
        yield from cursor.space()
        if (yield from cursor.expect(PARAMETER, INVOKE_CLOSE)) == INVOKE_CLOSE:
            return arguments
        name, kind = yield from cursor.text_until(IS_STRING, IS_JSON)
        value, _ = yield from cursor.text_until(PARAMETER_CLOSE)
        if name in arguments:
            raise Malformed
        arguments[name] = value if kind == IS_STRING else parse_json(value)
