"""Values that a format writes without quotes: their types come from the tool's JSON schema."""
from collections.abc import Mapping
from typing import Any

from sglane.entrypoints.parsers.cursor import SPACE, Malformed
from sglane.entrypoints.parsers.tool_calls.format import parse_json

ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
MAX_DEPTH = 8  # alternatives inside alternatives


def typed(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """The text itself where only a string is allowed; else the JSON value if its type is allowed; else the text."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    allowed = kinds(schema)
    if allowed == {"string"}:
        return listed(text, schema)
    try:
        value = parse_json(text)
    except Malformed:
        return text
    if isinstance(value, str) and "string" not in allowed:
        return text
    return value if kind(value) & allowed or "string" not in allowed else text


def listed(text: str, schema: Any) -> str:
    """White space around one of the values that a schema lists is not part of it."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    stripped = text.strip(SPACE)
    return stripped if isinstance(values, list) and text not in values and stripped in values else text


def kind(value: Any) -> set[str]:
    """JSON schema's names for the type of a value."""
    names = {
        bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"}, type(None): {"null"}, dict: {"object"}, list: {"array"},
    }
    return names[type(value)]


def kinds(schema: Any, depth: int = 0) -> frozenset[str]:
    """Types that a schema allows; all of them where it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str)) or ANY
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(alternatives, list) and alternatives:
            return frozenset().union(*(kinds(option, depth + 1) for option in alternatives))
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset().union(*(kind(value) for value in schema["enum"]))
    return ANY
