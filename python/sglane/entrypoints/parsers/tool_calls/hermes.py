"""Qwen3 (Hermes style): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block per call."""
from sglane.entrypoints.parsers.cursor import Cursor, Malformed
from sglane.entrypoints.parsers.tool_calls.format import CallReading, Template, Tools, call_of, parse_json, write_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    openers = (OPEN,)
    markers = (OPEN, CLOSE)
    template = Template(lambda name: f'{OPEN}\n{{"name": {write_json(name)}, "arguments": ', f"}}\n{CLOSE}", between="\n")

    def read(self, cursor: Cursor, tools: Tools, opener: str) -> CallReading:
        yield from cursor.space()
        call = parse_json((yield from cursor.json_object()))
        yield from cursor.space()
        yield from cursor.expect(CLOSE)
        if not isinstance(call.get("name"), str) or call["name"] not in tools:
            raise Malformed
        yield call_of(call["name"], call.get("arguments", {}))
