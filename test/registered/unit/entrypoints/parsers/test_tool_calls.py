"""Every format of tool calls: calls, text around them, malformed and cut ones; results never depend on how the text is split."""
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.parsing import Format, Parsed, assert_chunking_is_irrelevant
from sglane.entrypoints.parsers.tool_calls import FORMATS
from sglane.server_args import ToolCallFormat

TOOLS = {
    "get": {"properties": {"city": {"type": "string"}}},
    "get_weather": {"properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}, "note": {"type": ["string", "null"]},
    }},
    "now": {},
}
MARKUP = 'raw </arg_value <tool_call> </tool_call> <｜tool▁call▁end｜> "quoted" \\ odd "} \\"} <｜DSML｜invoke name="get"> Zürich 🌸'


def json_call(name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def write_hermes(calls):
    return "\n".join(f"<tool_call>\n{json_call(name, arguments)}\n</tool_call>" for name, arguments in calls)


def write_v31(calls):
    parts = ["<｜tool▁calls▁begin｜>"]
    for name, arguments in calls:
        parts += [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", json.dumps(arguments, ensure_ascii=False), "<｜tool▁call▁end｜>"]
    return "".join([*parts, "<｜tool▁calls▁end｜>"])


def write_dsml(calls):
    lines = ["<｜DSML｜function_calls>"]
    for name, arguments in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            text = value if is_string else json.dumps(value)
            lines.append(f'<｜DSML｜parameter name="{key}" string="{"true" if is_string else "false"}">{text}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, "</｜DSML｜function_calls>"])


def write_glm(calls, gap="\n"):
    blocks = []
    for name, arguments in calls:
        parts = [f"<tool_call>{name}"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parts += [f"<arg_key>{key}</arg_key>", f"<arg_value>{text}</arg_value>"]
        blocks.append(gap.join([*parts, "</tool_call>"]))
    return gap.join(blocks)


WRITERS = {
    "qwen3": write_hermes, "deepseekv31": write_v31, "deepseekv32": write_dsml, "glm45": write_glm,
    "glm47": lambda calls: write_glm(calls, ""), "glm5": lambda calls: write_glm(calls, ""),
}
PARIS = ("get_weather", {"city": "Paris", "days": 3})
MARKED = ("get", {"city": MARKUP})
DEEP = ("get_weather", {"deep": {"a": [1, -0.5, None, True, {"b": "}"}]}, "note": None, "city": ""})
NOW = ("now", {})

formats = pytest.mark.parametrize("name", WRITERS)


def test_names():
    assert set(FORMATS) == set(WRITERS) == set(ToolCallFormat.__args__)


@formats
@pytest.mark.parametrize("calls", [[PARIS], [NOW], [DEEP], [MARKED], [PARIS, NOW], [("get", {"city": "x"}), PARIS, ("get", {"city": "y"})]])
def test_calls(name, calls):
    parsed = assert_chunking_is_irrelevant(Format(name, tools=TOOLS), WRITERS[name](calls))
    assert parsed == Parsed(calls=calls)


@formats
@pytest.mark.parametrize("before", ["", "I will look. ", "Two\n\nlines < here\n\n", " \n"])
@pytest.mark.parametrize("after", ["", "\n", "\nThat is all.", " <"])
def test_text_around_calls(name, before, after):
    parsed = assert_chunking_is_irrelevant(Format(name, tools=TOOLS), before + WRITERS[name]([PARIS]) + after)
    inner = before[len(before.rstrip()) :] if before.strip() and after.strip() else ""
    assert parsed.calls == [PARIS]
    assert parsed.text == before.rstrip() + inner + (after.rstrip() if before.strip() else after.strip())


@formats
@pytest.mark.parametrize("text", ["", "Hello.\n", "  \n", "a < b, <tool, <｜", "call it a tool_call"])
def test_no_call(name, text):
    assert assert_chunking_is_irrelevant(Format(name, tools=TOOLS), text) == Parsed(text)
    assert assert_chunking_is_irrelevant(Format(name, tools=TOOLS), text, was_cut=True) == Parsed(text)


@formats
def test_every_cut(name):
    """Cut off anywhere: calls that were complete are there, nothing of the unfinished one is, and the text keeps what was written before."""
    text = "Hi.\n" + WRITERS[name]([PARIS, NOW])
    form, numbers, opener = Format(name, tools=TOOLS), [], FORMATS[name].openers[0]
    for place in range(len(text) + 1):
        parsed = form.parse([text[:place]], was_cut=True)
        numbers.append(len(parsed.calls))
        assert parsed.calls == [PARIS, NOW][: numbers[-1]]
        if place < 4 + len(opener):
            assert parsed.text == text[:place]
        else:  # a part of a further opener is text
            rest = parsed.text.removeprefix("Hi.")
            assert rest == "" or (rest.strip() and opener.startswith(rest.strip()) and text[:place].endswith(rest.strip()))
    assert numbers == sorted(numbers) and numbers[-1] == 2


@formats
@pytest.mark.parametrize("place", range(0, 60, 7))
def test_unfinished_call_of_a_model_that_stopped_is_text(name, place):
    text = WRITERS[name]([PARIS])[: 12 + place]
    assert assert_chunking_is_irrelevant(Format(name, tools=TOOLS), text) == Parsed(text)


MALFORMED = {
    "qwen3": [
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": "get", "arguments": 3}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name" }</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {}} and </tool_call>',
    ],
    "deepseekv31": [
        "<｜tool▁calls▁begin｜>now<｜tool▁sep｜>{}<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now {}<｜tool▁call▁end｜>",
    ],
    "deepseekv32": [
        "<｜DSML｜function_calls></｜DSML｜function_calls>",
        '<｜DSML｜invoke name="now" x="1">',
        '<｜DSML｜invoke name="now">text</｜DSML｜invoke>',
        '<｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="false">{</｜DSML｜parameter></｜DSML｜invoke>',
    ],
    "glm45": [
        "<tool_call>now there</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>now<arg_value>3</arg_value></tool_call>",
        "<tool_call>now<arg_key>a</arg_key><arg_key>b</arg_key></tool_call>",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_malformed_call_is_text(name, text):
    form = Format(name, tools=TOOLS)
    assert assert_chunking_is_irrelevant(form, text) == Parsed(text)
    assert assert_chunking_is_irrelevant(form, f"{text} {WRITERS[name]([NOW])}") == Parsed(text, calls=[NOW])


@formats
def test_unknown_tool_is_text(name):
    text = WRITERS[name]([("format_disk", {"city": "x"})])
    assert assert_chunking_is_irrelevant(Format(name, tools=TOOLS), text) == Parsed(text)


@formats
def test_deeply_nested_arguments_do_no_harm(name):
    text = WRITERS[name]([("get_weather", {"deep": {}})]).replace("{}", '{"a":' * 30000 + "{}" + "}" * 30000)
    parsed = Format(name, tools=TOOLS).parse([text])
    assert parsed.text == text or "glm" in name


def test_half_a_surrogate_pair_stays_an_escape():
    text = '<tool_call>{"name": "get", "arguments": {"city": "\\ud83d"}}</tool_call>'
    parser = Format("qwen3", tools=TOOLS).parser()
    (arguments,) = [event.fragment for event in [*parser.feed(text), *parser.finish(False)] if "Arguments" in type(event).__name__]
    assert arguments.encode() == b'{"city": "\\ud83d"}'


@pytest.mark.parametrize("name", ["glm45", "glm47", "glm5"])
def test_last_value_without_its_end_marker(name):
    form = Format(name, tools=TOOLS)
    text = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>city</arg_key><arg_value>Oslo</tool_call>"
    for end in ("", "\n"):
        assert assert_chunking_is_irrelevant(form, text + end) == Parsed(calls=[("get_weather", {"days": 3, "city": "Oslo"})])
    assert assert_chunking_is_irrelevant(form, text, was_cut=True) == Parsed()
    assert assert_chunking_is_irrelevant(form, text + " more") == Parsed(text + " more")


def test_self_closing_invoke():
    text = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜function_calls>'
    assert assert_chunking_is_irrelevant(Format("deepseekv32", tools=TOOLS), text) == Parsed(calls=[NOW])


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"type": "string"}, "3", "3"),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "integer"}, "3", 3),
    ({"type": "integer"}, "three", "three"),
    ({"type": "boolean"}, "true", True),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "3", "3"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3.5", "3.5"),
    ({"oneOf": [{"enum": ["a", 1]}]}, "1", 1),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "array"}, " [1, 2] ", [1, 2]),
    ({}, "007", "007"),
    ({}, "7", 7),
    (None, "plain", "plain"),
    ({"type": 3, "anyOf": 4, "enum": []}, "[1]", [1]),
    ("no schema", "x", "x"),
])
def test_types_of_glm_values(schema, text, value):
    tools = {"f": {"properties": {"a": schema}}}
    parsed = Format("glm45", tools=tools).parse([f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"])
    assert json.dumps(parsed.calls) == json.dumps([("f", {"a": value})])


PIECES = st.sampled_from([
    "text ", "\n", " ", "<", "get", "get_weather", "now", "{", "}", '"', "{}", "\\", "é", "🌸", '{"name": "now", "arguments": {}}',
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="now">', '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>",
    "</｜DSML｜invoke>", "</｜DSML｜function_calls>",
])


@formats
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=14), cuts=st.lists(st.integers(0, 200), max_size=8), was_cut=st.booleans(), inside=st.booleans())
def test_any_text_in_any_pieces(name, pieces, cuts, was_cut, inside):
    text = "".join(pieces)
    form = Format(name, "qwen3", TOOLS, "<think>\n" if inside else "")
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    whole = form.parse([text], was_cut)
    assert form.parse([text[start:end] for start, end in zip(places, places[1:])], was_cut) == whole
    assert form.parse(text, was_cut) == whole
