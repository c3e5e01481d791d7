"""Structural tags that hold a model to tool calls: what they let through, the format's reader reads.

The grammar library has templates of its own for some models; with them text may stand before a forced call, and arguments need not be an object where
a tool declares no parameters.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglane.entrypoints.parsers.tool_calls.format import Format

#: White space characters in a row inside JSON arguments.
MAX_WHITESPACE = 8
#: Line breaks that a model may write before its first call.
LINE_BREAKS: dict[str, Any] = {"type": "regex", "pattern": "\\n{0,2}"}
ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class Function:
    """A tool that may be called. schema: of an object."""

    name: str
    schema: dict[str, Any]


def only_calls(form: Format, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
    """At least one call, and nothing else."""
    opening, closing = form.template.frame
    calls = calls_of(form, functions, only_one)
    return {"type": "sequence", "elements": [LINE_BREAKS, *const(opening), calls, *const(closing)]}


def text_and_calls(form: Format, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
    """Any text; where a call begins, it must be a complete call of one of the functions. Only the first opener may begin calls."""
    opening, closing = form.template.frame
    tags = [tag_of(form, function) for function in functions]
    if opening:
        tags = [{"type": "tag", "begin": opening, "content": calls_of(form, functions, only_one), "end": closing}]
    trigger, *others = form.openers
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": only_one, "excludes": others}


def calls_of(form: Format, functions: Sequence[Function], only_one: bool) -> dict[str, Any]:
    tags = [tag_of(form, function) for function in functions]
    return {"type": "tags_with_separator", "tags": tags, "separator": form.template.between, "at_least_one": True, "stop_after_first": only_one}


def tag_of(form: Format, function: Function) -> dict[str, Any]:
    template = form.template
    arguments = {"type": "json_schema", "json_schema": function.schema, "style": template.style, "max_whitespace_cnt": MAX_WHITESPACE}
    return {"type": "tag", "begin": template.before(function.name), "content": arguments, "end": template.after}


def const(text: str) -> list[dict[str, Any]]:
    return [{"type": "const_string", "value": text}] if text else []
