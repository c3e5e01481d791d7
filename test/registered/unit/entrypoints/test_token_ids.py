"""Token ids and metadata on request: what streams add up to equals the whole answer; chat prompts given as ids. The planner echoes the prompt."""
import numpy as np
import pytest

from kits.front import Front
from sglane.plan.io_struct import GenerateRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = [504, 3575, 282, 4649, 314]


def body_of(route, **more):
    prompt = {"prompt": PROMPT} if route == TEXT else {"messages": [{"role": "user", "content": "ignored"}], "input_ids": PROMPT}
    return {**prompt, "temperature": 0, "max_tokens": 9, **more}


@pytest.mark.parametrize("route", [CHAT, TEXT])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_return_token_ids(front, route, tokens_per_step):
    front.behaviour.tokens_per_step = tokens_per_step
    body = body_of(route, return_token_ids=True, n=2)
    answer = front.ask(route, body)
    expected = (PROMPT * 2)[:9]
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 2
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [PROMPT] * 2
    assert answer.get("prompt_token_ids") == (PROMPT if route == CHAT else None)
    found, prompts = {0: [], 1: []}, []
    events = front.stream(route, body)
    for event in events:
        (choice,) = event["choices"]
        found[choice["index"]] += choice["token_ids"]
        prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert found == {0: expected, 1: expected} and prompts == [PROMPT] * 2
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == ([PROMPT] if route == CHAT else [])


def test_held_text_has_its_ids(config, tokenizer):
    """Tokens whose text a parser holds back come with the next chunk."""
    with Front(config, tokenizer, reasoning_parser="deepseek-r1") as front:
        events = front.stream(CHAT, body_of(CHAT, return_token_ids=True, stream_reasoning=False))
        assert sum((event["choices"][0]["token_ids"] for event in events), []) == (PROMPT * 2)[:9]


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_nothing_unasked(front, route):
    for event in [front.ask(route, body_of(route)), *front.stream(route, body_of(route))]:
        assert not {"token_ids", "prompt_token_ids", "meta_info"} & {*event, *event["choices"][0]}


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_meta_info_and_prompt_ids(front, route):
    body = body_of(route, return_meta_info=True, return_prompt_token_ids=True, logprobs=True if route == CHAT else 1, rid="a-name")
    (choice,) = front.ask(route, body)["choices"]
    assert choice["prompt_token_ids"] == PROMPT and "token_ids" not in choice
    meta = choice["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("a-name", 5, 9)
    assert meta["finish_reason"] == {"type": "length", "length": 9} and meta["e2e_latency"] >= 0
    assert [token for _, token, _ in meta["output_token_logprobs"]] == (PROMPT * 2)[:9]
    streamed = [event["choices"][0]["meta_info"] for event in front.stream(route, body) if "meta_info" in event["choices"][0]]
    assert len(streamed) == 1 and {**streamed[0], "e2e_latency": 0} == {**meta, "e2e_latency": 0}


def test_native_prompt_ids(front):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    assert "prompt_token_ids" not in front.ask("/generate", body)
    assert front.ask("/generate", {**body, "return_prompt_token_ids": True})["prompt_token_ids"] == PROMPT


def test_chat_prompt_as_ids(front):
    for body in (body_of(CHAT), {key: value for key, value in body_of(CHAT).items() if key != "messages"}):
        front.behaviour.received.clear()
        front.ask(CHAT, body)
        (request,) = front.wait_received(GenerateRequest, 1)
        assert np.frombuffer(request.input_ids, np.int32).tolist() == PROMPT


@pytest.mark.parametrize(("fields", "name"), [
    ({"input_ids": []}, "input_ids"), ({"input_ids": [1 << 31]}, "input_ids"), ({"input_ids": [49152]}, "input_ids"),
    ({"input_ids": "abc"}, "input_ids"), ({"input_ids": [[1]]}, "input_ids"), ({"input_ids": [5] * 600}, "input_ids"),
    ({"continue_final_message": True}, "continue_final_message"), ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"return_token_ids": 1}, "return_token_ids"), ({"return_meta_info": "yes"}, "return_meta_info"),
    ({"return_prompt_token_ids": 0}, "return_prompt_token_ids"),
])
def test_refusals(front, fields, name):
    response = front.post(CHAT, body_of(CHAT, **fields))
    assert response.status_code == 400 and response.json()["param"] == name, response.text


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_incremental_events_add_up(config, tokenizer, front, tokens_per_step):
    body = {"text": "Wie geht es Žďár 🌸?", "sampling_params": {"max_new_tokens": 20, "n": 2, "stop": "never"}}
    expected = front.ask("/generate", body)
    with Front(config, tokenizer, incremental_streaming_output=True) as incremental:
        incremental.behaviour.tokens_per_step = tokens_per_step
        found = {0: ["", []], 1: ["", []]}
        for event in incremental.stream("/generate", body):
            found[event["index"]][0] += event["text"]
            found[event["index"]][1] += event["output_ids"]
            assert event["meta_info"]["completion_tokens"] == len(found[event["index"]][1])
        assert list(found.values()) == [[answer["text"], answer["output_ids"]] for answer in expected]
