"""Which parsers one chat request needs: its tools, its wishes about thoughts, and the server's formats."""
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.grammar_fields import MAX_DEPTH, check_schema, sized
from sglane.entrypoints.parsers import reasoning, tool_calls
from sglane.entrypoints.parsers.answer import AnswerParser
from sglane.entrypoints.parsers.markers import markers_of
from sglane.entrypoints.parsers.reasoning import ReasoningParser
from sglane.entrypoints.parsers.tool_calls.constraint import ANY_OBJECT, Function, only_calls, text_and_calls
from sglane.entrypoints.parsers.tool_calls.format import Format
from sglane.entrypoints.parsers.tool_calls.parser import ToolCallParser
from sglane.entrypoints.sampling import NeededGrammar
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields, check_depth, kind_of
from sglane.plan.io_struct import Grammar
from sglane.server_args import ServerArgs

TOOL_NAME = re.compile(r"[^\s<>\"'{}]{1,256}")
MAX_TOOLS = 1024
#: Of a function that declares no parameters.
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model may call. declared: as the client sent them, for the template; None: no tools."""

    declared: list[dict[str, Any]] | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> parameters
    max_calls: int | None = None
    needed: NeededGrammar | None = None  # calls are forced, or held to their schemas


@dataclass(frozen=True)
class Parsing:
    """Makes the parsers of every choice."""

    tools: ToolUse
    tool_call_parser: str | None
    reasoning_parser: str | None
    separate_reasoning: bool = True
    stream_reasoning: bool = True

    @staticmethod
    def read(fields: Fields, args: ServerArgs) -> "Parsing":
        return Parsing(
            read_tools(fields, args.tool_call_parser), args.tool_call_parser, args.reasoning_parser,
            separate_reasoning=fields.flag("separate_reasoning", True), stream_reasoning=fields.flag("stream_reasoning", True),
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parsers look for."""
        return markers_of(None if self.tools.declared is None else self.tool_call_parser, self.reasoning_parser)

    def opening(self, prompt_end: str, messages: list[dict[str, Any]], continue_final_message: bool) -> str:
        """How the output begins: see `reasoning.opening`. prompt_end: the last few characters of the prompt."""
        if self.reasoning_parser is None:
            return ""
        if continue_final_message:
            return "inside" if reasoning.ends_inside(messages[-1]["content"]) else ""
        return reasoning.opening(reasoning.FORMATS[self.reasoning_parser], prompt_end)

    def reasoning(self, is_inside: bool) -> ReasoningParser | None:
        """is_inside: the prompt has begun the thoughts."""
        return None if self.reasoning_parser is None else ReasoningParser(is_inside, keep_markers=not self.separate_reasoning)

    def answer(self, is_inside: bool) -> AnswerParser:
        calls = None
        if self.tools.declared is not None and self.tool_call_parser is not None:
            calls = ToolCallParser(tool_calls.FORMATS[self.tool_call_parser], self.tools.schemas, self.tools.max_calls)
        return AnswerParser(self.reasoning(is_inside), calls, thoughts_are_text=not self.separate_reasoning, stream_thoughts=self.stream_reasoning)


def read_tools(fields: Fields, tool_call_parser: str | None) -> ToolUse:
    """tools, tool_choice and parallel_tool_calls. Raises a 400 for what is malformed or not supported."""
    choice = read_choice(fields)
    is_parallel = fields.flag("parallel_tool_calls", True)
    tools = fields.get("tools")
    if tools is None or tools == []:
        if choice.must_call:
            raise bad_field("tool_choice", "asks for a call, but the request has no tools")
        return ToolUse()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"must be an array of at most {MAX_TOOLS} tools")
    read: dict[str, Tool] = {}
    for index, item in enumerate(tools):
        tool = read_tool(index, item)
        if tool.name in read:
            raise bad_field("tools", f"[{index}].function.name {tool.name!r} is there twice")
        read[tool.name] = tool
    if choice.kind == "none":
        return ToolUse()
    if tool_call_parser is None:
        raise bad_field("tools", f"need a server that was started with --tool-call-parser (one of {', '.join(tool_calls.FORMATS)})")
    if choice.name and choice.name not in read:
        raise bad_field("tool_choice", f"names the function {choice.name[:80]!r}, which is not among the tools")
    needed = needed_grammar(tool_calls.FORMATS[tool_call_parser], list(read.values()), choice, only_one=not is_parallel)
    return ToolUse(tools, {name: tool.parameters for name, tool in read.items()}, None if is_parallel else 1, needed)


@dataclass(frozen=True)
class Choice:
    """kind: none, auto, required, or function (then `name` must be called)."""

    kind: str
    name: str = ""

    @property
    def must_call(self) -> bool:
        return self.kind in ("required", "function")


def read_choice(fields: Fields) -> Choice:
    choice = fields.get("tool_choice")
    if choice in (None, "auto", "none", "required"):
        return Choice(choice or "auto")
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field("tool_choice", "must be 'auto', 'none', 'required' or {\"type\": \"function\", \"function\": {\"name\": ...}}")
    return Choice("function", function["name"])


@dataclass(frozen=True)
class Tool:
    """One function. place: where it stood, for messages. parameters: JSON schema. is_strict: no other arguments may come out."""

    place: str
    name: str
    parameters: Mapping[str, Any]
    is_strict: bool

    def function(self, *, follow_schema: bool) -> Function:
        """For a grammar. Raises a 400 for parameters that are no object, and if the tool is strict for what a grammar can't enforce."""
        schema = {"type": "object", **self.parameters} if self.parameters else NO_ARGUMENTS
        if schema["type"] != "object":
            raise bad_field("tools", f"{self.place}.parameters must be of the type object, not {str(schema['type'])[:40]!r}")
        if self.is_strict:
            check_schema("tools", schema)
        return Function(self.name, schema if follow_schema or self.is_strict else ANY_OBJECT)


def read_tool(index: int, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        raise bad_field("tools", f"[{index}] must be {{\"type\": \"function\", \"function\": {{...}}}}")
    name, parameters, place = function.get("name"), function.get("parameters"), f"[{index}].function"
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise bad_field("tools", f"{place}.name must be a string of 1 to 256 characters without spaces, quotes, brackets and braces")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_field("tools", f"{place}.parameters must be an object, not {kind_of(parameters)}")
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise bad_field("tools", f"{place}.description must be a string")
    if not isinstance(function.get("strict", False), bool | None):
        raise bad_field("tools", f"{place}.strict must be true or false, not {kind_of(function['strict'])}")
    return Tool(place, name, parameters or {}, bool(function.get("strict")))


def needed_grammar(form: Format, tools: Sequence[Tool], choice: Choice, *, only_one: bool) -> NeededGrammar | None:
    """Forced calls are the whole answer. With `auto`, a strict tool holds the arguments of its calls to their schema."""
    if choice.must_call:
        functions = [tool.function(follow_schema=True) for tool in tools if choice.name in ("", tool.name)]
        shape = only_calls(form, functions, only_one=only_one or choice.kind == "function")
    elif any(tool.is_strict for tool in tools):
        functions = [tool.function(follow_schema=False) for tool in tools]
        shape = text_and_calls(form, functions, only_one=only_one)
    else:
        return None
    check_depth("tools", shape, MAX_DEPTH)
    grammar = sized("tools", Grammar("structural_tag", orjson.dumps({"type": "structural_tag", "format": shape}).decode()))
    return NeededGrammar(grammar, "tool_choice" if choice.must_call else "tools", "tools", is_exclusive=choice.must_call)


def check_template(tools: ToolUse, tokenizer: TextTokenizer) -> None:
    """A model that isn't told of its tools would never call them: a 400 says so."""
    if tools.declared is not None and not tokenizer.takes_tools:
        raise bad_field("tools", "cannot be shown to this model: its chat template does not take them; see --chat-template")
