"""What one format of tool calls has to say, and the values that calls are made of."""
import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sglane.entrypoints.parsers.cursor import Cursor, Malformed

#: Name of a tool -> the JSON schema of its parameters.
Tools = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """A complete call. arguments: text of a JSON object."""

    name: str
    arguments: str


#: Yields None where it needs more text, and every complete call.
CallReading = Generator[Call | None, None, None]


@dataclass(frozen=True)
class Template:
    """How a model of this format writes calls when nothing but calls is allowed."""

    before: Callable[[str], str]  # tool's name -> what stands before the arguments
    after: str  # what stands behind them
    style: str = "json"  # how the arguments are written: the grammar library's name for it
    frame: tuple[str, str] = ("", "")  # around all calls
    between: str = ""  # two calls


class Format(Protocol):
    """One way of writing calls. It has no state: what was read is in the cursor."""

    @property
    def template(self) -> Template: ...

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that begin calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that tokenizers may treat as special tokens."""

    def read(self, cursor: Cursor, tools: Tools, opener: str) -> CallReading:
        """Read what follows an opener, up to the end of the calls. Raises Malformed, and OutOfText from the cursor."""


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: str) -> Any:
    """A value that a model wrote. Line breaks inside strings are let through; Malformed for anything else that is not JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def write_json(value: Any) -> str:
    """Text of a value from `parse_json`; always valid UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:  # 1e999 is read as infinity
        raise Malformed from error
    return text if is_utf8(text) else json.dumps(value)


def is_utf8(text: str) -> bool:
    """False for halves of surrogate pairs, which only JSON escapes can write."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def call_of(name: str, arguments: Any) -> Call:
    """Raises Malformed unless the arguments are an object."""
    if not isinstance(arguments, dict):
        raise Malformed
    return Call(name, write_json(arguments))
