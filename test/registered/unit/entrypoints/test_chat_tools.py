"""Tool calls and reasoning in /v1/chat/completions. The chat template gives out the last message alone and the planner echoes it: the test writes
every output token."""
import dataclasses
import json

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kits.front import Front
from kits.sse import collect_openai
from sglane.entrypoints.openai.messages import read_messages
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields
from sglane.plan.io_struct import GenerateRequest

#: The prompt is the last user message. Earlier messages and tools are put after the end token, so that a test can look at them.
TEMPLATE = """{{ messages[-1]['content'] }}<|im_end|>{% for tool in tools or [] %}TOOL {{ tool.function.name }};{% endfor %}
{%- for message in messages[:-1] %}
{%- for call in message.tool_calls or [] %}CALL {{ call.function.name }} ARGUMENTS;{% endfor %}
{%- if message.role == 'tool' %}RESULT {{ message.content }};{% endif %}
{%- endfor %}{{ prompt_end }}"""
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Žďár 🌸"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHTS = "<think>\nLet me see: a < b.\n</think>\n\n"
WEATHER_CALL, TIME_CALL = ("get_weather", '{"city": "Žďár 🌸"}'), ("get_time", "{}")


@pytest.fixture(scope="module")
def echo_tokenizer(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "echo.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return TextTokenizer(config.source.path, str(path))


@pytest.fixture(scope="module")
def front(config, echo_tokenizer):
    with Front(config, echo_tokenizer, tool_call_parser="qwen3", reasoning_parser="qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def plain_front(config, echo_tokenizer):
    with Front(config, echo_tokenizer) as running:
        yield running


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=30) as opened:
        yield opened


def body_of(text, **more):
    return {"messages": [{"role": "user", "content": text}], "tools": [WEATHER, TIME], "temperature": 0, **more}


def streamed(front, body):
    """(message, finish reason) that the chunks add up to."""
    events = front.stream("/v1/chat/completions", body)
    (choice,), _ = collect_openai(events, 1, False, chat=True)
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (event["choices"][0]["delta"] for event in events):
        assert sum(bool(delta[key]) for key in message) <= 1
        message["content"] += delta["content"] or ""
        message["reasoning_content"] += delta["reasoning_content"] or ""
        for part in delta["tool_calls"] or []:
            if part["index"] == len(message["tool_calls"]):
                assert part["type"] == "function" and part["id"].startswith("call_") and part["function"]["arguments"] == ""
                message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    calls = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
    return (message["content"], message["reasoning_content"], calls), choice.finish_reason


def whole(front, body):
    answer = front.ask("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message["tool_calls"] or []
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert message["content"] is not None or calls
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return (message["content"] or "", message["reasoning_content"] or "", calls), choice["finish_reason"], answer["usage"]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize(("text", "message", "finish_reason"), [
    ("Just text <tool.", ("Just text <tool.", "", []), "stop"),
    (CALL, ("", "", [WEATHER_CALL]), "tool_calls"),
    (f"I will look.\n{CALL}", ("I will look.", "", [WEATHER_CALL]), "tool_calls"),
    (f"{CALL}\n{SECOND}", ("", "", [WEATHER_CALL, TIME_CALL]), "tool_calls"),
    (f"{THOUGHTS}{CALL}", ("", "Let me see: a < b.", [WEATHER_CALL]), "tool_calls"),
    (f"{THOUGHTS}Yes.", ("Yes.", "Let me see: a < b.", []), "stop"),
    (f"{THOUGHTS}Both:\n{CALL}{SECOND}\nDone.", ("Both:\n\nDone.", "Let me see: a < b.", [WEATHER_CALL, TIME_CALL]), "tool_calls"),
    ("<tool_call>\nno JSON\n</tool_call>", ("<tool_call>\nno JSON\n</tool_call>", "", []), "stop"),
    (CALL.replace("get_weather", "unknown"), (CALL.replace("get_weather", "unknown"), "", []), "stop"),
    (CALL[:-5], (CALL[:-5], "", []), "stop"),
])
def test_stream_equals_answer(front, text, message, finish_reason, tokens_per_step):
    front.behaviour.tokens_per_step = tokens_per_step
    assert whole(front, body_of(text))[:2] == (message, finish_reason)
    assert streamed(front, body_of(text)) == (message, finish_reason)


@pytest.mark.parametrize("text", [f"Hi.\n{CALL}", f"{THOUGHTS}{CALL}\n{SECOND}"])
def test_cut_by_length(front, echo_tokenizer, text):
    """An unfinished call never shows. `tool_calls` is the reason if, and only if, a call is complete."""
    num_tokens = len(echo_tokenizer.encode(text, add_special_tokens=False))
    for limit in range(1, num_tokens + 1, 3):
        message, reason, _ = whole(front, body_of(text, max_tokens=limit))
        assert streamed(front, body_of(text, max_tokens=limit)) == (message, reason)
        assert message[2] == [WEATHER_CALL, TIME_CALL][: len(message[2])]
        assert reason == ("tool_calls" if message[2] else "length")
        assert "arguments" not in message[0]


def test_stop_string_inside_a_call(front):
    assert whole(front, body_of(f"Hi.\n{CALL}", stop=["city"]))[:2] == (("Hi.", "", []), "stop")


def test_several_choices(front):
    events = front.stream("/v1/chat/completions", body_of(CALL, n=3))
    choices, _ = collect_openai(events, 3, False, chat=True)
    assert [choice.finish_reason for choice in choices] == ["tool_calls"] * 3
    ids = {part["id"] for event in events for part in event["choices"][0]["delta"]["tool_calls"] or [] if "id" in part}
    assert len(ids) == 3


def test_parallel_tool_calls_false(front):
    body = body_of(f"{CALL}{SECOND}", parallel_tool_calls=False)
    assert whole(front, body)[0] == streamed(front, body)[0] == ("", "", [WEATHER_CALL])


def test_choice_none_shows_no_tools(front, echo_tokenizer):
    for body in (body_of(CALL, tool_choice="none"), {**body_of(CALL), "tools": None}, {**body_of(CALL), "tools": []}):
        assert whole(front, body)[:2] == ((CALL, "", []), "stop")
        request = front.behaviour.received_of(GenerateRequest)[-1]
        assert "TOOL" not in prompt_of(echo_tokenizer, request)


def prompt_of(tokenizer, request):
    return tokenizer.decode(np.frombuffer(request.input_ids, np.int32))


#: How templates write the arguments of earlier calls.
ARGUMENTS = {
    "walks through an object": "{% for key, value in call.function.arguments.items() %}{{ key }}:{{ value }},{% endfor %}",
    "writes an object as JSON": "{{ call.function.arguments | tojson }}",
    "joins a text": "{{ '' + call.function.arguments }}",
    "prints a text": "{{ call.function.arguments }}",
    "takes both": "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}",
}


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory):
    """Folder of a tokenizer that loads fast."""
    folder = tmp_path_factory.mktemp("small")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("way", ARGUMENTS)
@pytest.mark.parametrize("as_text", [True, False])
def test_conversation_with_calls_reaches_the_template(small_tokenizer, tmp_path, way, as_text):
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}" + TEMPLATE.partition("messages[:-1] %}")[2].partition("{{ prompt_end")[0]
                    .replace("ARGUMENTS", ARGUMENTS[way]).replace("{%- for call", "{% for call"), encoding="utf-8")
    tokenizer = TextTokenizer(small_tokenizer, str(path))
    arguments = '{"city": "Žďár"}' if as_text else {"city": "Žďár"}
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    empty = {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "" if as_text else {}}}
    messages = read_messages(Fields({"messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call, empty]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20 C"}]}, {"role": "user", "content": "Fine."},
    ]}))
    shown, nothing = ("city:Žďár,", "") if "walks" in way else ('{"city": "Žďár"}', "{}")
    assert tokenizer.render(messages, True, False, {}) == f"CALL get_weather {shown};CALL get_time {nothing};RESULT 20 C;"


def test_conversation_with_calls(front, echo_tokenizer):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 C"}, {"role": "user", "content": "Fine."},
    ]
    assert whole(front, {**body_of(""), "messages": messages, "tool_choice": "auto"})[:2] == (("Fine.", "", []), "stop")
    prompt = prompt_of(echo_tokenizer, front.behaviour.received_of(GenerateRequest)[-1])
    assert prompt == "Fine.<|im_end|>TOOL get_weather;TOOL get_time;CALL get_weather ARGUMENTS;RESULT 20 C;"


@pytest.mark.parametrize("separate", [True, False])
def test_marker_in_the_prompt(front, separate):
    text, body = "Let me see.\n</think>\n\nYes.", {"chat_template_kwargs": {"prompt_end": "<think>\n"}, "separate_reasoning": separate}
    expected = ("Yes.", "Let me see.", []) if separate else (text, "", [])
    assert whole(front, body_of(text, **body))[0] == streamed(front, body_of(text, **body))[0] == expected


def test_continued_thoughts(front):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>so far"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 6}
    (choice,) = front.ask("/v1/chat/completions", body)["choices"]
    assert choice["message"]["reasoning_content"] and not choice["message"]["content"]


def test_thoughts_in_the_text(front):
    """separate_reasoning false: as written, and calls in them are no calls."""
    text = f"<think>\nmaybe {SECOND}\n</think>\n\nYes.\n{CALL}"
    body = body_of(text, separate_reasoning=False)
    assert whole(front, body)[0] == streamed(front, body)[0] == (text.removesuffix(f"\n{CALL}"), "", [WEATHER_CALL])


def test_thoughts_in_one_delta(front):
    events = front.stream("/v1/chat/completions", body_of(f"{THOUGHTS}Yes.", stream_reasoning=False))
    parts = [event["choices"][0]["delta"]["reasoning_content"] for event in events]
    assert [part for part in parts if part] == ["Let me see: a < b."]


@pytest.mark.parametrize("tokens_per_step", [1, 7])
def test_reasoning_tokens(front, echo_tokenizer, tokens_per_step):
    front.behaviour.tokens_per_step = tokens_per_step
    expected = len(echo_tokenizer.encode("<think>\nLet me see: a < b.\n</think>", add_special_tokens=False))
    body = body_of(f"{THOUGHTS}Yes.", stream_options={"include_usage": True})
    *_, usage = whole(front, body)
    assert expected <= usage["reasoning_tokens"] <= expected + 1 < usage["completion_tokens"]  # a token may hold the marker's end and more
    assert front.stream("/v1/chat/completions", body)[-1]["usage"] == usage
    assert whole(front, body_of("Yes."))[2]["reasoning_tokens"] == 0
    assert whole(front, body_of(THOUGHTS, max_tokens=4))[2]["reasoning_tokens"] == 4


def test_logprobs_of_held_text(front, echo_tokenizer):
    """Every token's entry is sent, whatever becomes of its text."""
    body = body_of(f"{THOUGHTS}{CALL}", logprobs=True)
    (choice,), _ = collect_openai(front.stream("/v1/chat/completions", body), 1, False, chat=True)
    tokens = [entry["token"] for part in choice.logprobs for entry in part["content"]]
    expected = front.ask("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    assert tokens == [entry["token"] for entry in expected]


def test_openai_client(client):
    message = {"model": "m", "messages": [{"role": "user", "content": f"Look:\n{CALL}"}], "tools": [WEATHER]}
    (choice,) = client.chat.completions.create(**message).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Look:"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Žďár 🌸"})
    with client.chat.completions.stream(**message) as stream:
        stream.until_done()
        (streamed_choice,) = stream.get_final_completion().choices
    assert streamed_choice.finish_reason == "tool_calls" and streamed_choice.message.content == "Look:"
    assert streamed_choice.message.tool_calls[0].function.arguments == call.function.arguments


def test_generate_knows_no_parsers(front):
    answer = front.ask("/generate", {"text": f"{THOUGHTS}{CALL}<|im_end|>", "sampling_params": {"temperature": 0}})
    assert answer["text"] == f"{THOUGHTS}{CALL}"


def test_without_parsers(plain_front):
    response = plain_front.post("/v1/chat/completions", body_of("x"))
    assert response.status_code == 400 and "--tool-call-parser" in response.json()["message"] and response.json()["param"] == "tools"
    assert whole(plain_front, {**body_of(f"{THOUGHTS}{CALL}"), "tools": None})[0] == (f"{THOUGHTS}{CALL}", "", [])
    assert whole(plain_front, body_of("x", tool_choice="none"))[0] == ("x", "", [])


def test_model_info(front, plain_front):
    assert [front.http.get("/model_info").json()[key] for key in ("tool_call_parser", "reasoning_parser")] == ["qwen3", "qwen3"]
    assert [plain_front.http.get("/model_info").json()[key] for key in ("tool_call_parser", "reasoning_parser")] == [None, None]


@pytest.mark.parametrize(("more", "name"), [
    ({"tools": 3}, "tools"),
    ({"tools": [3]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": 3}}]}, "tools"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [TIME] * 1025}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "get_time"}}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"separate_reasoning": "yes"}, "separate_reasoning"),
    ({"stream_reasoning": 1}, "stream_reasoning"),
    ({"functions": [{"name": "a"}]}, "functions"),
])
def test_wrong_body(front, more, name):
    response = front.post("/v1/chat/completions", body_of("x", **more))
    assert response.status_code == 400 and response.json()["param"] == name, response.text


def test_template_without_tools(config, tokenizer):
    with Front(config, tokenizer, tool_call_parser="qwen3") as front:
        response = front.post("/v1/chat/completions", body_of("x"))
        assert response.status_code == 400 and "chat template" in response.json()["message"]


def test_markers_that_are_special_tokens(config, tmp_path):
    """They are read although special tokens are skipped; other special tokens stay hidden."""
    folder, file = config.source.path.rpartition("/")[::2]
    hf = AutoTokenizer.from_pretrained(folder, gguf_file=file) if file.endswith(".gguf") else AutoTokenizer.from_pretrained(config.source.path)
    hf.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<tool_call>", "</tool_call>"]})
    hf.save_pretrained(tmp_path)
    (tmp_path / "echo.jinja").write_text(TEMPLATE, encoding="utf-8")
    text = f"{THOUGHTS}<file_sep>Hi.\n{CALL}"
    tokenizer = TextTokenizer(str(tmp_path), str(tmp_path / "echo.jinja"))
    roomy = dataclasses.replace(config, vocab_size=config.vocab_size + 8)
    with Front(roomy, tokenizer, tool_call_parser="qwen3", reasoning_parser="qwen3") as front:
        front.planner.behaviour.tokens_per_step = 2
        message = whole(front, body_of(text))[0]
        assert message == streamed(front, body_of(text))[0] == ("Hi.", "Let me see: a < b.", [WEATHER_CALL])
