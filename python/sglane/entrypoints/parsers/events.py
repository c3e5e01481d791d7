"""What parsers make of a model's text, in the order in which it was written."""
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of the thoughts in front of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. index: 0 for the answer's first call, then one more each."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; all pieces of a call together are one JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""

    index: int


Event = Text | Reasoning | CallStart | CallArguments | CallEnd
