"""Which parsers one chat request needs: its tools, its wishes about thoughts, and the server's formats."""
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.parsers import reasoning, tool_calls
from sglane.entrypoints.parsers.answer import AnswerParser
from sglane.entrypoints.parsers.reasoning import ReasoningParser
from sglane.entrypoints.parsers.tool_calls.parser import ToolCallParser
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields, kind_of
from sglane.server_args import ServerArgs

TOOL_NAME = re.compile(r"[^\s<>\"'{}]{1,256}")
MAX_TOOLS = 1024


@dataclass(frozen=True)
class ToolUse:
    """Tools that the model may call. declared: as the client sent them, for the template; None: no tools."""

    declared: list[dict[str, Any]] | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> parameters
    max_calls: int | None = None


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
        markers = reasoning.MARKERS if self.reasoning_parser is not None else ()
        if self.tools.declared is None or self.tool_call_parser is None:
            return markers
        return (*markers, *tool_calls.FORMATS[self.tool_call_parser].markers)

    def begins_inside(self, prompt_end: str, messages: list[dict[str, Any]], continue_final_message: bool) -> bool:
        """Whether the output begins with thoughts. prompt_end: the last few characters of the prompt."""
        if self.reasoning_parser is None:
            return False
        if continue_final_message:
            return reasoning.ends_inside(messages[-1]["content"])
        return reasoning.begins_inside(reasoning.FORMATS[self.reasoning_parser], prompt_end)

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
        return ToolUse()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"must be an array of at most {MAX_TOOLS} tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        name, parameters = read_tool(index, tool)
        if name in schemas:
            raise bad_field("tools", f"[{index}].function.name {name!r} is there twice")
        schemas[name] = parameters
    if choice == "none":
        return ToolUse()
    if tool_call_parser is None:
        raise bad_field("tools", f"need a server that was started with --tool-call-parser (one of {', '.join(tool_calls.FORMATS)})")
    return ToolUse(tools, schemas, None if is_parallel else 1)


def read_choice(fields: Fields) -> str:
    """none or auto. The others need output that is held to a grammar."""
    choice = fields.get("tool_choice")
    if choice in (None, "auto", "none"):
        return choice or "auto"
    if choice == "required" or isinstance(choice, dict):
        raise bad_field("tool_choice", "can only be 'auto' or 'none' on this server: it cannot force a model to call a tool")
    raise bad_field("tool_choice", "must be 'auto' or 'none'")


def read_tool(index: int, tool: Any) -> tuple[str, Mapping[str, Any]]:
    """(name, JSON schema of the parameters)."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        raise bad_field("tools", f"[{index}] must be {{\"type\": \"function\", \"function\": {{...}}}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise bad_field("tools", f"[{index}].function.name must be a string of 1 to 256 characters without spaces, quotes, brackets and braces")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad_field("tools", f"[{index}].function.parameters must be an object, not {kind_of(parameters)}")
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise bad_field("tools", f"[{index}].function.description must be a string")
    return name, parameters or {}


def check_template(tools: ToolUse, tokenizer: TextTokenizer) -> None:
    """A model that isn't told of its tools would never call them: a 400 says so."""
    if tools.declared is not None and not tokenizer.takes_tools:
        raise bad_field("tools", "cannot be shown to this model: its chat template does not take them; see --chat-template")
