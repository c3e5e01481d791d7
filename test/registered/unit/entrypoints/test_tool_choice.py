"""Forced and strict tool calls at the front: what the planner gets, and what is refused. The planner echoes the prompt."""
import json

import pytest

from kits.front import Front
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.plan.io_struct import GenerateRequest

CHAT = "/v1/chat/completions"
#: The prompt is the last message, then whatever the test wants at its end.
TEMPLATE = "{{ messages[-1]['content'] }}<|im_end|>{% if tools %}{% endif %}{{ prompt_end }}"
CITY = {"type": "function", "function": {"name": "get_city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
TIME = {"type": "function", "function": {"name": "get_time"}}
STRICT = {"type": "function", "function": {**CITY["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def echo_tokenizer(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "echo.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return TextTokenizer(config.source.path, str(path))


@pytest.fixture(scope="module")
def front(config, echo_tokenizer):
    with Front(config, echo_tokenizer, tool_call_parser="qwen3", reasoning_parser="qwen3") as running:
        yield running


def body_of(text="x", **more):
    return {"messages": [{"role": "user", "content": text}], "tools": [CITY, TIME], "temperature": 0, "max_tokens": 4, **more}


def grammar_of(front, **more):
    """What the planner was told."""
    front.behaviour.received.clear()
    front.ask(CHAT, body_of(**more))
    (request,) = front.wait_received(GenerateRequest, 1)
    return request.sampling.grammar


def tags_of(grammar):
    return json.loads(grammar.text)["format"]["elements"][1]


def test_required_is_a_choice_of_all_tools(front):
    tags = tags_of(grammar_of(front, tool_choice="required"))
    assert tags["at_least_one"] and not tags["stop_after_first"]
    assert [tag["content"]["json_schema"] for tag in tags["tags"]] == [
        CITY["function"]["parameters"], {"type": "object", "properties": {}, "additionalProperties": False}]
    assert tags_of(grammar_of(front, tool_choice="required", parallel_tool_calls=False))["stop_after_first"]


def test_a_named_tool_is_the_only_one(front):
    tags = tags_of(grammar_of(front, tool_choice=NAMED))
    assert tags["stop_after_first"] and len(tags["tags"]) == 1 and "get_time" in tags["tags"][0]["begin"]


def test_auto_is_free_unless_a_tool_is_strict(front):
    assert grammar_of(front) is None and grammar_of(front, tool_choice="none") is None
    shape = json.loads(grammar_of(front, tools=[STRICT, TIME]).text)["format"]
    assert shape["type"] == "triggered_tags" and len(shape["tags"]) == 2
    assert grammar_of(front, tools=[STRICT, TIME], tool_choice="none") is None
    assert grammar_of(front, tools=[STRICT, TIME], response_format={"type": "json_object"}).kind == "json_schema"


@pytest.mark.parametrize("fields", [
    {"tool_choice": "required"}, {"tools": [], "response_format": {"type": "json_object"}}, {"tools": [], "regex": "x+"},
])
def test_thoughts_come_first(front, fields):
    """The grammar begins where the thoughts end, wherever they begin."""
    expected = [("", "maybe"), ("<think>\n", "inside"), ("<think>\n\n</think>\n\n", "")]
    assert [grammar_of(front, chat_template_kwargs={"prompt_end": end}, **fields).thoughts for end, _ in expected] == [word for _, word in expected]


def test_no_thoughts_without_a_parser(config, echo_tokenizer):
    with Front(config, echo_tokenizer, tool_call_parser="glm47") as front:
        assert grammar_of(front, tool_choice="required", chat_template_kwargs={"prompt_end": "<think>"}).thoughts == ""


def test_a_forced_call_is_read_like_any_other(front):
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for stream in (False, True):
        body = body_of(call, tool_choice="required", max_tokens=100)
        if stream:
            deltas = [event["choices"][0]["delta"]["tool_calls"] for event in front.stream(CHAT, body)]
            calls = [part["function"] for delta in deltas for part in delta or []]
            assert [part.get("name") for part in calls] == ["get_time", None] and calls[1]["arguments"] == "{}"
        else:
            (choice,) = front.ask(CHAT, body)["choices"]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"][0]["function"]["name"] == "get_time"


def strict_with(schema):
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]


@pytest.mark.parametrize(("more", "name", "word"), [
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": None, "tool_choice": NAMED}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice", "'unknown'"),
    ({"tool_choice": "required", "regex": "a"}, "regex", "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "tool_choice"),
    ({"tool_choice": "required", "min_tokens": 2}, "min_tokens", "exclude"),
    ({"tools": strict_with({"type": "string"}), "tool_choice": "required"}, "tools", "[0].function.parameters"),
    ({"tools": strict_with({"type": "object", "not": {}})}, "tools", "'not'"),
    ({"tools": strict_with({"type": "object", "properties": {"a": {"type": "foo"}}})}, "tools", "foo"),
    ({"tools": strict_with({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}), "tool_choice": "required"}, "tools", "none"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(front, more, name, word, stream):
    response = front.post(CHAT, body_of(stream=stream, **more))
    assert response.status_code == 400 and response.json()["param"] == name and word in response.json()["message"], response.text
    assert front.wait_idle() and not front.behaviour.received_of(GenerateRequest)


@pytest.mark.parametrize("backend", ["none", "llguidance"])
def test_without_structural_tags(config, echo_tokenizer, backend):
    with Front(config, echo_tokenizer, tool_call_parser="qwen3", grammar_backend=backend) as front:
        for more, name in (({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": NAMED}, "tool_choice"), ({"tools": [STRICT]}, "tools")):
            response = front.post(CHAT, body_of(**more))
            assert response.status_code == 400 and response.json()["param"] == name, response.text
            assert f"--grammar-backend {backend}" in response.json()["message"]
        assert front.post(CHAT, body_of()).status_code == 200
