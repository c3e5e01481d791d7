"""Wrong requests: a 400 in one shape that names the field, never a 5xx, and the next good request works."""
import concurrent.futures
import json
import random
import time

import orjson
import pytest

from kits.front import Front
from sglane.plan.io_struct import GenerateRequest

NAN, INFINITY = float("nan"), float("inf")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


GOOD = {"/generate": {"input_ids": [504]}, "/v1/completions": {"prompt": [504], "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}}
ROUTES = list(GOOD)
#: field -> wrong values, on all routes.
WRONG_SAMPLING = {
    "temperature": [NAN, INFINITY, -INFINITY, "NaN", "1", -1, 1e308, True, [1], {}],
    "top_p": [NAN, 0, -0.1, 1.5, "0.5", True],
    "top_k": [-2, 1.5, "3", True, NAN, 1 << 70],
    "min_p": [-0.1, 1.1, NAN],
    "frequency_penalty": [NAN, 3, -3, "1"],
    "presence_penalty": [INFINITY, 3],
    "repetition_penalty": [0, -1, NAN, 3],
    "n": [0, -1, 1.5, "2", True, 100000],
    "stop": ["", [""], 3, [3], {"a": 1}, ["x"] * 1000],
    "stop_token_ids": [[-1], [49152], [1 << 63], [1.5], ["3"], 3, [[3]], [True], [None]],
    "logit_bias": [{"abc": 1}, {"": 1}, {"49152": 1}, {"-1": 1}, {"3": NAN}, {"3": 101}, {"3": "1"}, {"3": None}, [3], {"9" * 5000: 1}],
    "json_schema": ["{", 3, [1], "[]", '"a"', {"not": {}}, {"$ref": "a.json"}, {"properties": {"a": {"uniqueItems": True}}},
                    {"allOf": [{}, {"type": "object"}]}, {"minimum": NAN}, {"enum": [{"a": INFINITY}]}, {"const": nested(150)},
                    '{"items":' * 200 + "{}" + "}" * 200, '{"items":' * 5000 + "{}" + "}" * 5000, "x" * 300_000],
    "regex": [3, ["a"], {}, "(" * 100 + ")" * 100, "x" * 300_000],
    "ebnf": [3, "(" * 100],
    "structural_tag": ["{", 3, [], {"type": "structural_tag", "format": {"type": "const_string", "value": NAN}},
                       {"structures": 3}, {"structures": [{"begin": "a"}]}],
    "stop_regex": ["(", "", 3, [3], ["a", "["], "x" * 257, ["x"] * 17, "a*", "(?:)"],
}
WRONG_NATIVE = {
    "max_new_tokens": [-1, 1.5, "3", True, NAN, 1 << 40],
    "min_new_tokens": [-1, 1000, "1"],
    "sampling_seed": [1.5, "1", 1 << 64],
}
WRONG_OPENAI = {
    "max_tokens": [-1, 1.5, "3", True],
    "min_tokens": [-1, 1000],
    "seed": [1.5, "1"],
    "stream": ["yes", 1],
    "lora_path": ["x"],
    "bootstrap_room": [0, 7, [1]],
    "rid": ["", 3, "x" * 2000],
    "response_format": [{"type": "xml"}, {"json_schema": {}}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, "text",
                        {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, {"type": "json_schema", "json_schema": {"schema": 3}}],
    "model": [3],
    "stream_options": [3, []],
    "priority": [1.5, "1", 1 << 40],
    "cache_salt": [3],
    "best_of": [3],
}
CASES = [(route, name, value) for route in ROUTES for name, values in WRONG_SAMPLING.items() for value in values]
CASES += [("/generate", name, value) for name, values in WRONG_NATIVE.items() for value in values]
CASES += [(route, name, value) for route in ROUTES[1:] for name, values in WRONG_OPENAI.items() for value in values]


def check_refusal(response, status=400):
    assert response.status_code == status, (response.status_code, response.text)
    body = response.json()
    assert body["object"] == "error" and body["code"] == status
    assert body["error"]["message"] == body["message"]
    return body


def send(front, route, body):
    """With NaN and Infinity as Python's clients write them."""
    return front.http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.parametrize(("route", "name", "value"), CASES, ids=[f"{route[-11:]}-{name}-{str(value)[:20]}" for route, name, value in CASES])
def test_wrong_field(front, route, name, value):
    in_sampling = route == "/generate" and name not in ("stream", "rid")
    body = {**GOOD[route], "sampling_params": {name: value}} if in_sampling else {**GOOD[route], name: value}
    answer = check_refusal(send(front, route, body))
    assert name in answer["message"] and answer["param"] == name, answer


NATIVE_BODIES = [
    ({}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": [""]}, "text"),
    ({"text": ["a", ""]}, "text"),
    ({"text": 3}, "text"),
    ({"text": ["a", 3]}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [49152]}, "input_ids"),
    ({"input_ids": [1 << 31]}, "input_ids"),
    ({"input_ids": [1 << 63]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": ["3"]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [[1], 2]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [[[1]]]}, "input_ids"),
    ({"input_ids": "12"}, "input_ids"),
    ({"input_ids": [None]}, "input_ids"),
    ({"input_ids": [1] * 600}, "input_ids"),
    ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params"),
    ({"input_ids": [1], "sampling_params": [{}]}, "sampling_params"),
    ({"input_ids": [1], "return_logprob": 1}, "return_logprob"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"input_ids": [1], "logprob_start_len": -2}, "logprob_start_len"),
    ({"input_ids": [1], "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"input_ids": [1], "top_logprobs_num": 10**6}, "top_logprobs_num"),
    ({"input_ids": [1], "token_ids_logprob": [49152]}, "token_ids_logprob"),
    ({"input_ids": [1], "token_ids_logprob": [-1]}, "token_ids_logprob"),
    ({"input_ids": [1], "token_ids_logprob": "3"}, "token_ids_logprob"),
    ({"input_ids": [1], "token_ids_logprob": [3] * 1025}, "token_ids_logprob"),
    ({"text": ["a"] * 5000}, "text"),
    ({"input_ids": [[1]] * 5000}, "input_ids"),
    ({"input_ids": [1], "unread": nested(300)}, "unread"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid"),
    ({"input_ids": [1], "rid": ""}, "rid"),
    ({"input_ids": [1], "rid": ["a"]}, "rid"),
    ({"input_ids": [1], "stream": "x"}, "stream"),
    ({"input_ids": [1], "lora_path": "x"}, "lora_path"),
    ({"input_ids": [1], "input_embeds": [[0.1]]}, "input_embeds"),
    ({"input_ids": [1], "return_hidden_states": True}, "return_hidden_states"),
    ({"input_ids": [1], "image_data": "x"}, "image_data"),
    ({"input_ids": [1], "bootstrap_host": "127.0.0.1"}, "bootstrap_host"),
    ({"input_ids": [1], "custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"input_ids": [1], "routed_dp_rank": 1}, "routed_dp_rank"),
]
CHAT_BODIES = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": 3, "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "name": nested(300)}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": {"a": 1}}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 500 + "]" * 500}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}] * 70000}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": nested(300)}}}]}, "tools"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
]
COMPLETION_BODIES = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1] * 600}, "prompt"),
    ({"prompt": ["a"] * 5000}, "prompt"),
    ({"prompt": [[1]] * 5000}, "prompt"),
    ({"prompt": [1], "logprobs": True}, "logprobs"),
    ({"prompt": [1], "logprobs": -1}, "logprobs"),
    ({"prompt": [1], "suffix": "x"}, "suffix"),
    ({"prompt": [1], "echo": 1}, "echo"),
]
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = [("/generate", body, name) for body, name in NATIVE_BODIES]
BODIES += [("/v1/chat/completions", body if "messages" in body or not body else {**HI, **body}, name) for body, name in CHAT_BODIES]
BODIES += [("/v1/completions", body, name) for body, name in COMPLETION_BODIES]


@pytest.mark.parametrize(("route", "body", "name"), BODIES, ids=[f"{route[-11:]}-{name}-{number}" for number, (route, _, name) in enumerate(BODIES)])
def test_wrong_body(front, route, body, name):
    answer = check_refusal(front.post(route, body))
    assert name in answer["message"] and answer["param"] == name, answer


MALFORMED = [b"{", b"[]", b"null", b"123", b'"text"', b"\xff\xfe", b'{"text": "\\ud800"}', b"[" * 100000, b'{"a": 1} x', b"{'a': 1}", b"NaN"]


@pytest.mark.parametrize("route", [*ROUTES, "/abort_request"])
@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_bodies(front, route, data):
    check_refusal(front.http.post(route, content=data, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("route", ROUTES)
def test_wrong_content_type_method_and_route(front, route):
    check_refusal(front.http.post(route, content=b"{}", headers={"content-type": "text/plain"}), 415)
    check_refusal(front.http.get(route), 405)
    check_refusal(front.http.post(route + "/x", json={}), 404)
    check_refusal(front.http.post(route), 400)


def test_too_large_body(config, tokenizer):
    with Front(config, tokenizer, max_body_bytes=1000) as front:
        for route in (*ROUTES, "/tokenize", "/abort_request"):
            check_refusal(front.post(route, {"text": "x" * 2000}), 413)
        front.ask("/generate", {"text": "x" * 500, "sampling_params": {"max_new_tokens": 1}})


@pytest.mark.parametrize("timeout", ["nan", "-1", "x", "inf", "1e9"])
def test_flush_timeout(front, timeout):
    answer = check_refusal(front.post(f"/flush_cache?timeout={timeout}"))
    assert "timeout" in answer["message"]


def test_values_with_a_meaning(front):
    sampling = {"temperature": 1e-30, "top_k": 0, "top_p": 1, "min_p": 0, "n": 1, "max_new_tokens": 1, "logit_bias": {"3": -100}}
    front.ask("/generate", {"input_ids": [504], "sampling_params": sampling})
    front.ask("/generate", {"input_ids": [504], "sampling_params": {"temperature": -0.0, "max_new_tokens": 1}})
    first, second = front.wait_received(GenerateRequest, 2)
    assert first.sampling.temperature == second.sampling.temperature == 0.0
    assert first.sampling.top_k == -1 and first.sampling.logit_bias == {3: -100.0}


def test_prompt_logprobs_of_a_request_are_limited(front, monkeypatch):
    monkeypatch.setattr("sglane.entrypoints.request_builder.MAX_PROMPT_LOGPROBS", 60)
    wish = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5, "sampling_params": {"max_new_tokens": 1}}
    answer = check_refusal(front.post("/generate", {**wish, "input_ids": [[504] * 6, [504] * 5]}))
    assert answer["param"] == "logprob_start_len" and "66" in answer["message"]
    front.ask("/generate", {**wish, "input_ids": [[504] * 5, [504] * 5]})
    echo = {"prompt": [504] * 11, "echo": True, "logprobs": 5, "max_tokens": 1}
    assert check_refusal(front.post("/v1/completions", echo))["param"] == "logprobs"
    front.ask("/v1/completions", {**echo, "prompt": [504] * 10})


def test_abort_names_are_checked_before_one_is_ended(front):
    body = {"input_ids": [504], "rid": "named", "sampling_params": {"max_new_tokens": 3}}
    front.planner.hold()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(front.ask, "/generate", body)
            while not front.state.engine().client.num_jobs:
                time.sleep(0.01)
            check_refusal(front.post("/abort_request", {"rid": ["named", 3]}))
            front.planner.go_on()
            assert answer.result()["meta_info"]["finish_reason"]["type"] == "length"
    finally:
        front.planner.go_on()


@pytest.mark.parametrize("texts", [[""] * 70000, [[1]] * 70000])
def test_number_of_texts(front, texts):
    is_text = isinstance(texts[0], str)
    answer = check_refusal(front.post("/tokenize" if is_text else "/detokenize", {"prompt" if is_text else "tokens": texts}))
    assert "more than 65536" in answer["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_other_encodings_are_not_guessed(front, encoding):
    check_refusal(front.http.post("/generate", content='{"input_ids": [504]}'.encode(encoding), headers={"content-type": "application/json"}))


def random_value(rng, depth=0):
    makers = [
        lambda: None, lambda: rng.choice([True, False]), lambda: rng.randint(-5, 60000), lambda: rng.random() * 10,
        lambda: rng.choice(["", "a", "text", "é"]),
        lambda: [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))] if depth < 3 else 1,
        lambda: {rng.choice(["role", "content", "type", "text", "x"]): random_value(rng, depth + 1) for _ in range(2)} if depth < 3 else {},
    ]
    return rng.choice(makers)()


def test_random_bodies_never_give_a_5xx(front):
    rng = random.Random(3)
    front.behaviour.tokens_per_step = 1000
    names = sorted({*WRONG_SAMPLING, *WRONG_NATIVE, *WRONG_OPENAI, *(name for _, _, name in BODIES)} - {"n"})
    for _ in range(600):
        route = rng.choice(ROUTES)
        body = {**GOOD[route], **{name: random_value(rng) for name in rng.sample(names, rng.randint(1, 3))}}
        if route == "/generate":
            body["sampling_params"] = {name: random_value(rng) for name in rng.sample(names, rng.randint(0, 2))}
        response = front.http.post(route, content=orjson.dumps(body), headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), (body, response.status_code, response.text)
    assert front.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 1}})["output_ids"] == [504]
