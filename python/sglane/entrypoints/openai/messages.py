"""The conversation of a chat request, as chat templates want it."""
from typing import Any

import orjson

from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.validation import MAX_BODY_DEPTH, Fields, check_depth, kind_of

MAX_MESSAGES = 1 << 16


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation with contents as plain strings."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "must be an array with at least one message")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"has {len(messages)} messages, more than {MAX_MESSAGES}")
    return [read_message(index, message) for index, message in enumerate(messages)]


def read_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_field("messages", f"[{index}] must be an object, not {kind_of(message)}")
    if not isinstance(message.get("role"), str):
        raise bad_field("messages", f"[{index}].role must be a string")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise bad_field("messages", f"[{index}].tool_calls must be an array, not {kind_of(calls)}")
    read = {**message, "content": read_content(index, message.get("content"), may_be_null=bool(calls))}
    if calls:
        read["tool_calls"] = [read_tool_call(index, call) for call in calls]
    return {key: value for key, value in read.items() if value is not None}


def read_content(index: int, content: Any, may_be_null: bool) -> str:
    """A string, or the texts of a list of parts."""
    if content is None and may_be_null:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_field("messages", f"[{index}].content must be a string or an array of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_field("messages", f"[{index}].content has a part that is not {{\"type\": \"text\", \"text\": ...}}; only text is supported")
        texts.append(part["text"])
    return " ".join(texts)


def read_tool_call(index: int, call: Any) -> dict[str, Any]:
    """A call in the history, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_field("messages", f"[{index}].tool_calls must hold function calls")
    return {**call, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}


def read_arguments(arguments: Any) -> Any:
    """An object, or what the client sent if it is none: then the template decides."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = orjson.loads(arguments.strip() or "{}")  # some clients write nothing for no arguments
    except orjson.JSONDecodeError:
        return arguments
    check_depth("messages", value, MAX_BODY_DEPTH)
    return value
