"""Texts that parsers look for: tokens that are part of one must reach them, special or not."""
from sglane.entrypoints.parsers import reasoning, tool_calls


def markers_of(tool_call_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """None: there is no such parser."""
    thoughts = () if reasoning_parser is None else reasoning.MARKERS
    return thoughts if tool_call_parser is None else (*thoughts, *tool_calls.FORMATS[tool_call_parser].markers)
