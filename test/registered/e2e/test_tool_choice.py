"""Forced tool calls by the default model, which has never heard of tools, behind real servers; both grammar libraries; flags by variables."""
import json

import openai
import pytest

from kits.audit import assert_clean, wait_idle
from kits.server import Server

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}<|im_start|>assistant
{{ prompt_end }}"""
WEATHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False}}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FLAGS = ("--dtype", "float32", "--max-total-tokens", "4096")


def serve(tmp_path_factory, **variables):
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    env = {f"SGLANE_ARG_{name}": value for name, value in {"CHAT_TEMPLATE": str(path), **variables}.items()}
    return Server(*FLAGS, env=env)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory, TOOL_CALL_PARSER="glm47", REASONING_PARSER="qwen3") as running:
        yield running


def check_weather(function):
    arguments = json.loads(function.arguments)
    assert function.name == "get_weather" and list(arguments) == ["city", "days"], arguments
    assert arguments["city"] in ("Paris", "Rome") and arguments["days"] in range(1, 10), arguments


@pytest.mark.parametrize("thinks", [False, True])
def test_a_named_tool(server, thinks):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        end = "<think>\nI call it.</think>\n" if thinks else "<think>\n\n</think>\n\n"
        fields = {"model": "default", "messages": [{"role": "user", "content": "How is the weather in Rome?"}], "tools": [WEATHER, NOW],
                  "tool_choice": NAMED, "temperature": 0, "max_tokens": 150, "extra_body": {"chat_template_kwargs": {"prompt_end": end}}}
        whole = client.chat.completions.create(**fields).choices[0]
        assert whole.finish_reason == "tool_calls" and not whole.message.content and len(whole.message.tool_calls) == 1
        check_weather(whole.message.tool_calls[0].function)
        if thinks:
            return
        with client.chat.completions.stream(**fields) as stream:
            stream.until_done()
            (streamed,) = stream.get_final_completion().choices
        assert streamed.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments
    assert_clean(wait_idle(server))


def test_required(server):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150, "chat_template_kwargs": {"prompt_end": "<think></think>"}}
    answer = server.chat("Call something.", tools=[WEATHER, NOW], temperature=1, seed=1, **fields)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and call["function"]["name"] in ("get_weather", "now")
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"})
    assert response.status_code == 400 and response.json()["param"] == "tool_choice"
    assert_clean(wait_idle(server))


def test_thoughts_are_free_and_the_answer_is_not(server):
    """This model may think until its limit; where the prompt has closed the thoughts, the answer is all there is."""
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}, "max_tokens": 80}
    answer = server.chat("Is it?", chat_template_kwargs={"prompt_end": "<think>\n"}, **fields)["choices"][0]
    assert answer["message"]["reasoning_content"]
    assert answer["finish_reason"] == "length" or json.loads(answer["message"]["content"]) in ("yes", "no")
    answer = server.chat("Is it?", chat_template_kwargs={"prompt_end": "<think>hm</think>"}, **fields)["choices"][0]
    assert json.loads(answer["message"]["content"]) in ("yes", "no") and not answer["message"]["reasoning_content"]


def test_llguidance(tmp_path_factory):
    with serve(tmp_path_factory, TOOL_CALL_PARSER="qwen3", GRAMMAR_BACKEND="llguidance") as server:
        schema = WEATHER["function"]["parameters"]
        for temperature in (0, 1.2):
            answer = server.generate("Weather as JSON:\n", json_schema=schema, max_new_tokens=80, temperature=temperature, sampling_seed=1)
            assert answer["meta_info"]["finish_reason"]["type"] == "stop" and json.loads(answer["text"])["city"] in ("Paris", "Rome")
        assert server.generate("Is water wet? ", ebnf='start: "of course" | "no way"', max_new_tokens=20)["text"] in ("of course", "no way")
        response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [NOW], "tool_choice": "required"})
        assert response.status_code == 400 and "--grammar-backend llguidance" in response.json()["message"]
        assert server.server_info()["grammar_backend"] == "llguidance"
        assert_clean(wait_idle(server))
