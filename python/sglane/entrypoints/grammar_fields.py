"""Structured output as clients ask for it -> a Grammar. Looks at form and size only; whether it compiles is for `grammar_checker`."""
import json
from collections.abc import Iterator
from typing import Any

import orjson

from sglane.entrypoints.errors import ApiError, bad_field
from sglane.entrypoints.validation import Fields, check_depth, children, kind_of, shown
from sglane.plan.io_struct import Grammar

MAX_GRAMMAR_BYTES = 256 << 10
#: Arrays and objects inside one another; an object inside an object takes two in a JSON schema.
MAX_DEPTH = 128
#: Parentheses of a regex or a grammar inside one another.
MAX_GROUP_DEPTH = 64
KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
#: Keywords whose meaning the library does not enforce: refused, so that nobody takes the answer for checked.
NOT_ENFORCED = ("not", "if", "then", "else", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies")
#: Keywords that hold one schema, a list of schemas, or schemas by name.
SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")


def parse_grammar(fields: Fields, with_response_format: bool) -> tuple[str, Grammar | None]:
    """(field, what the answer must match). Raises a 400 when two fields ask for something, or one is malformed or too large."""
    asked = [name for name in KINDS if fields.get(name) not in (None, "")]
    form = fields.object("response_format") if with_response_format else {}
    if form and form.get("type") != "text":
        asked.append("response_format")
    if not asked:
        return "", None
    if len(asked) > 1:
        raise bad_field(asked[1], f"and {asked[0]} exclude each other: an answer can follow one of them")
    name = asked[0]
    if name == "response_format":
        return name, from_response_format(form)
    if name == "json_schema":
        return name, from_schema(name, fields.get(name), strict=True)
    if name == "structural_tag":
        return name, from_tag(name, fields.get(name))
    text = fields.string(name)
    assert text is not None
    check_groups(name, text)
    return name, sized(name, Grammar(name, text))


def from_response_format(form: dict[str, Any]) -> Grammar:
    """OpenAI's field. strict false: objects may have more properties than the schema names."""
    name, kind = "response_format", form.get("type")
    if kind == "json_object":
        return Grammar("json_schema", '{"type":"object"}', strict=False)
    if kind == "structural_tag":
        return from_tag(name, form)
    if kind != "json_schema":
        raise bad_field(name, f"has the type {shown(kind)!r}, not text, json_object, json_schema or structural_tag")
    inner = form.get("json_schema")
    if not isinstance(inner, dict):
        raise bad_field(name, f"needs json_schema, an object with a schema, not {kind_of(inner)}")
    schema = inner.get("schema", inner.get("schema_"))
    if schema is None:
        raise bad_field(name, "needs json_schema.schema")
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise bad_field(name, f"json_schema.strict must be true or false, not {kind_of(strict)}")
    return from_schema(name, schema, strict=strict is not False)


def from_schema(name: str, value: Any, *, strict: bool) -> Grammar:
    """A JSON schema as text or as an object."""
    schema = read_json(name, value)
    if not isinstance(schema, dict | bool):
        raise bad_field(name, f"must be a JSON schema: an object, not {kind_of(schema)}")
    check_schema(name, schema)
    return sized(name, Grammar("json_schema", written(name, schema), strict))


def from_tag(name: str, value: Any) -> Grammar:
    """A structural tag: xgrammar's form, or SGLang's older one with `structures` and `triggers`."""
    tag = read_json(name, value)
    if not isinstance(tag, dict):
        raise bad_field(name, f"must be a structural tag: an object, not {kind_of(tag)}")
    if "structures" in tag:
        tag = {"type": "structural_tag", "format": from_structures(name, tag)}
    for schema in schemas_of_tag(tag):
        check_schema(name, schema)
    return sized(name, Grammar("structural_tag", written(name, tag)))


def from_structures(name: str, tag: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(item, dict) and {"begin", "end"} <= item.keys() for item in structures):
        raise bad_field(name, "structures must be an array of objects with begin, schema and end")
    tags = [{"begin": item["begin"], "end": item["end"], "content": {"type": "json_schema", "json_schema": item.get("schema", {})}}
            for item in structures]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def read_json(name: str, value: Any) -> Any:
    """Text is parsed; everything is held to the depth limit."""
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:
            raise too_large(name)
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise bad_field(name, f"is not valid JSON: {error}") from error
    check_depth(name, value, MAX_DEPTH)
    return value


def written(name: str, value: Any) -> str:
    """As JSON. What Python reads and JSON does not know (NaN, Infinity) is refused: it would become null."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:
        raise bad_field(name, "has a number that is not finite") from error


def check_groups(name: str, text: str) -> None:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth > MAX_GROUP_DEPTH:
            raise bad_field(name, f"has more than {MAX_GROUP_DEPTH} parentheses inside one another")


def check_schema(name: str, schema: Any) -> None:
    """Refuses keywords that would silently not be enforced. Anything malformed is left to the library."""
    pending = [schema]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        for keyword in NOT_ENFORCED:
            if schema.get(keyword, False) is not False:
                raise bad_field(name, f"has the keyword {keyword!r}, which is not supported")
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
            raise bad_field(name, "has 'allOf' with several schemas, which is not supported")
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
            raise bad_field(name, f"has the $ref {reference[:40]!r}; only references inside the schema (#/...) are supported")
        pending += [schema.get(keyword) for keyword in SCHEMA_KEYWORDS]
        for keyword in LIST_KEYWORDS:
            pending += schema[keyword] if isinstance(schema.get(keyword), list) else []
        for keyword in MAP_KEYWORDS:
            pending += schema[keyword].values() if isinstance(schema.get(keyword), dict) else []


def schemas_of_tag(tag: dict[str, Any]) -> Iterator[Any]:
    """The JSON schemas anywhere in a structural tag."""
    pending: list[Any] = [tag]
    while pending:
        item = pending.pop()
        if isinstance(item, dict) and item.get("type") in ("json_schema", "qwen_xml_parameter") and "json_schema" in item:
            yield item["json_schema"]
        else:
            pending += children(item)


def sized(name: str, grammar: Grammar) -> Grammar:
    if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise too_large(name)
    return grammar


def too_large(name: str) -> ApiError:
    return bad_field(name, f"is larger than {MAX_GRAMMAR_BYTES} bytes")
