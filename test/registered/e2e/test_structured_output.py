"""Structured output by the default model behind a real server; bad grammars are refused while a neighbour's stream goes on."""
import json
import re
import threading
import time

import openai
import pytest

from kits.audit import assert_clean, wait_idle
from kits.server import Server

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99},
                   "home": {"type": "object", "properties": {"owned": {"type": "boolean"}}, "required": ["owned"], "additionalProperties": False}},
    "required": ["color", "age", "home"], "additionalProperties": False,
}
PROMPT = "A person as JSON:\n"


@pytest.fixture(scope="module")
def server():
    with Server("--dtype", "float32", "--max-total-tokens", "4096") as running:
        yield running


@pytest.fixture(autouse=True)
def books_balance(server):
    yield
    assert_clean(wait_idle(server))


def check_person(text):
    value = json.loads(text)
    assert list(value) == ["color", "age", "home"] and value["color"] in ("red", "green") and 1 <= value["age"] <= 99, text
    assert type(value["age"]) is int and type(value["home"]["owned"]) is bool and len(value["home"]) == 1, text


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "sampling_seed": 3},
                                      {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 4, "frequency_penalty": 1.0}])
def test_json_schema_and_its_stream(server, sampling):
    fields = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 120, "temperature": 0, **sampling}
    body = {"text": PROMPT, "sampling_params": fields}
    whole = server.ask("/generate", body)
    check_person(whole["text"])
    assert whole["meta_info"]["finish_reason"]["type"] == "stop"
    events = list(server.stream("/generate", body))
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]


def test_regex_and_ebnf(server):
    answer = server.generate("Call me at ", regex=r"[0-9]{3}-[0-9]{4}", max_new_tokens=20, extra={"return_logprob": True})
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", answer["text"]), answer
    assert len(answer["meta_info"]["output_token_logprobs"]) == answer["meta_info"]["completion_tokens"]
    answer = server.generate("Is water wet? ", ebnf='root ::= "of course" | "no way"', max_new_tokens=20)
    assert answer["text"] in ("of course", "no way") and answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_openai_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        fields = {"model": "default", "messages": [{"role": "user", "content": "Make up a person."}], "temperature": 0, "max_tokens": 120}
        whole = client.chat.completions.create(**fields, response_format=form).choices[0]
        check_person(whole.message.content)
        assert whole.finish_reason == "stop"
        chunks = client.chat.completions.create(**fields, response_format=form, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
        free = client.chat.completions.create(**{**fields, "max_tokens": 24}, response_format={"type": "json_object"}).choices[0]
        assert re.match(r'\{\s*("|\})', free.message.content), free
        text = client.completions.create(model="default", prompt="1, 2, 3,", max_tokens=12, extra_body={"regex": "( [0-9]+,){3}"}).choices[0]
        assert re.fullmatch("( [0-9]+,){3}", text.text), text


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def one_of(depth):
    if depth == 0:
        return {"type": "string"}
    branches = [{"k0": one_of(depth - 1)}, *({f"k{index}": {"type": "integer"}} for index in range(1, 20))]
    return {"oneOf": [{"type": "object", "properties": properties} for properties in branches]}


def deep_text(depth):
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


#: (fields, status)
HARD = [
    ({"json_schema": json.dumps(nested(10))}, 200), ({"json_schema": deep_text(100)}, 400), ({"json_schema": deep_text(5000)}, 400),
    ({"json_schema": one_of(8)}, 200), ({"json_schema": {"$ref": "#"}}, 400), ({"regex": "(a{1,5"}, 400), ({"regex": "(" * 5000 + ")" * 5000}, 400),
    ({"json_schema": {"enum": [f"value {number} of many" for number in range(12000)]}}, 400), ({"regex": "b{3}"}, 200),
]


def test_hard_grammars_harm_nobody(server):
    """Each is answered within 10 s; a neighbour's stream never stands still for long."""
    server.generate("warm", regex="a", max_new_tokens=2)  # the compiler's process has started
    gaps, stop = [], threading.Event()

    def neighbour():
        while not stop.is_set():
            last = time.monotonic()
            body = {"text": "Once upon a time", "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}}
            for _ in server.stream("/generate", body):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        for fields, status in HARD:
            begin = time.monotonic()
            response = server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3, "temperature": 0, **fields}})
            elapsed_s = time.monotonic() - begin
            name = next(iter(fields))
            assert response.status_code == status, (str(fields)[:80], response.text[:300])
            assert status == 200 or response.json()["param"] == name, response.text[:300]
            assert elapsed_s < 10, (str(fields)[:80], elapsed_s)
    finally:
        stop.set()
        thread.join()
    assert len(gaps) > 20 and max(gaps) < 5, sorted(gaps)[-5:]


def test_two_ranks():
    with Server("--dtype", "float32", "--max-total-tokens", "4096", "--cp-size", "2", "--enable-cp-shared-kv", "--page-size", "16") as server:
        answer = server.generate(PROMPT, json_schema=json.dumps(SCHEMA), max_new_tokens=120)
        check_person(answer["text"])
        assert_clean(wait_idle(server))
    with Server("--dtype", "float32", "--max-total-tokens", "4096", "--grammar-backend", "none") as server:
        response = server.post("/generate", {"text": "x", "sampling_params": {"regex": "a"}})
        assert response.status_code == 400 and "--grammar-backend none" in response.json()["message"]
