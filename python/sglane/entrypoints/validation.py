"""Reads fields of a JSON object. A null is an absent field; every refusal is a 400 that names the field."""
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import regex

from sglane.entrypoints.errors import ApiError, bad_field

#: Longest name of a request.
MAX_RID_CHARACTERS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
MAX_PATTERNS = 16
MAX_PATTERN_CHARACTERS = 256
PATTERN_TIMEOUT_S = 0.05
#: Arrays and objects inside one another in a body: far below where Python's own recursion ends, in templates and in JSON.
MAX_BODY_DEPTH = 192
#: Characters of a wrong value that are repeated in a message.
MAX_SHOWN = 40
#: Values that mean "not asked for" in a field that is not supported.
UNSET = (None, False, "", [], {})


def parse_object(data: bytes) -> dict[str, Any]:
    """A request body. NaN and Infinity are let through here, so that the field they stand in is named later."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        value = _parse_with_nan(data, error)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {kind_of(value)}")
    if data.count(b"[") + data.count(b"{") > MAX_BODY_DEPTH:  # else it cannot be that deep
        for name, item in value.items():
            check_depth(name[:MAX_SHOWN], item, MAX_BODY_DEPTH - 1)
    return value


def check_depth(name: str, value: Any, limit: int) -> None:
    """A 400 for more than `limit` arrays and objects inside one another."""
    level = [value]
    for _ in range(limit):
        level = [item for holder in level for item in children(holder)]
        if not level:
            return
    raise bad_field(name, f"has more than {limit} arrays and objects inside one another")


def children(holder: Any) -> Iterator[Any]:
    """Arrays and objects directly inside."""
    items = holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ()
    return (item for item in items if isinstance(item, dict | list))


def shown(value: Any) -> str:
    """The beginning of a wrong value, for a message."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _parse_with_nan(data: bytes, cause: orjson.JSONDecodeError) -> Any:
    try:
        value = json.loads(data.decode())  # from bytes it would guess other encodings
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
        return value
    except (ValueError, RecursionError):
        pass
    raise ApiError(400, f"the body is not valid JSON: {cause}") from cause


def kind_of(value: Any) -> str:
    """JSON's name for the type of a value."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return names[type(value)]


class Fields:
    """One JSON object, read field by field."""

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def get(self, name: str) -> Any:
        """The raw value; None when absent or null."""
        return self._values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_field(name, f"must be true or false, not {kind_of(value)}")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        return check_integer(name, self.get(name), default, low, high)

    def number(self, name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        """A finite number in [low, high], or in (low, high] with `above`."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise bad_field(name, f"must be a number, not {kind_of(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise bad_field(name, f"must be finite, got {value}")
        if value < low or value > high or (above and value == low):
            raise bad_field(name, f"must be in {'(' if above else '['}{low:g}, {high:g}], got {shown(value)}")
        return float(value)

    def string(self, name: str, default: str | None = None) -> str | None:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise bad_field(name, f"must be a string, not {kind_of(value)}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad_field(name, f"must be an object, not {kind_of(value)}")
        return value

    def stops(self, name: str) -> tuple[str, ...]:
        """A stop string or a list of them."""
        value = self.get(name)
        if value is None:
            return ()
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise bad_field(name, "must be a string or an array of strings")
        if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise bad_field(name, f"must hold at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters")
        return tuple(dict.fromkeys(stops))

    def patterns(self, name: str) -> tuple[str, ...]:
        """A regular expression or a list of them; each compiles and does not match the empty text."""
        value = self.get(name)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise bad_field(name, "must be a string or an array of strings")
        if len(texts) > MAX_PATTERNS or any(not 0 < len(text) <= MAX_PATTERN_CHARACTERS for text in texts):
            raise bad_field(name, f"must hold at most {MAX_PATTERNS} expressions of 1 to {MAX_PATTERN_CHARACTERS} characters")
        for text in texts:
            check_pattern(name, text)
        return tuple(dict.fromkeys(texts))

    def token_list(self, name: str, vocab_size: int) -> list[int]:
        """A list of token ids; empty when absent."""
        value = self.get(name)
        return [] if value is None else token_ids(name, value, vocab_size).tolist()

    def refuse(self, names: Iterable[str], why: str = "is not supported by this server") -> None:
        """Raise for the first of `names` that asks for something."""
        for name in names:
            if self.get(name) not in UNSET:
                raise bad_field(name, why)


def check_integer(name: str, value: Any, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if type(value) is not int:
        raise bad_field(name, f"must be an integer, not {value if isinstance(value, float) else kind_of(value)}")
    if not low <= value <= high:
        raise bad_field(name, f"must be in [{low}, {high}], got {shown(value)}")
    return value


def token_ids(name: str, values: Any, vocab_size: int) -> npt.NDArray[np.int32]:
    """A list of token ids -> int32 [n]. Raises for anything but integers in [0, vocab_size)."""
    if not isinstance(values, list) or set(map(type, values)) - {int}:
        raise bad_field(name, "must be an array of integer token ids")
    if values and (min(values) < 0 or max(values) >= vocab_size):
        wrong = min(values) if min(values) < 0 else max(values)
        raise bad_field(name, f"has token id {shown(wrong)}, which is outside the vocabulary [0, {vocab_size - 1}]")
    return np.array(values, dtype=np.int32)


def check_pattern(name: str, text: str) -> None:
    try:
        matches_nothing = regex.compile(text).fullmatch("", timeout=PATTERN_TIMEOUT_S) is not None
    except (regex.error, OverflowError, RecursionError) as error:
        raise bad_field(name, f"{text[:40]!r} is no regular expression: {error}") from error
    except TimeoutError as error:
        raise bad_field(name, f"{text[:40]!r} takes too long") from error
    if matches_nothing:
        raise bad_field(name, f"{text[:40]!r} matches the empty text, so it would end everything at once")


def check_rid(rid: Any) -> str:
    if not isinstance(rid, str) or not 0 < len(rid) <= MAX_RID_CHARACTERS:
        raise bad_field("rid", f"must be a string of 1 to {MAX_RID_CHARACTERS} characters")
    return rid


def per_item(name: str, value: Any, num_items: int, is_batch: bool) -> Sequence[Any]:
    """One value for all items, or one for each item of a batch."""
    if not (is_batch and isinstance(value, list)):
        return [value] * num_items
    if len(value) != num_items:
        raise bad_field(name, f"has {len(value)} entries for {num_items} prompts")
    return value
