"""/v1/chat/completions and /v1/completions over real HTTP, also through OpenAI's own client; the planner behind them echoes the prompt."""
import numpy as np
import openai
import pytest

from kits.fake_planner import QUEUE_FULL, logprob_of
from kits.sse import collect_openai
from sglane.plan.io_struct import GenerateRequest

TEXT = "Příliš \U0001f468\u200d\U0001f469\u200d\U0001f467 žluťoučký kůň"


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).tolist()


def chat_ids(tokenizer, *contents):
    roles = ["user", "assistant"]
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    text += "".join(f"<|im_start|>{roles[index % 2]}\n{content}<|im_end|>\n" for index, content in enumerate(contents))
    return ids_of(tokenizer, text + "<|im_start|>assistant\n")


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=30) as opened:
        yield opened


# --- completions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_choices", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("usage", [False, True])
def test_completion_stream_equals_answer(front, tokenizer, num_choices, tokens_per_step, usage):
    front.behaviour.tokens_per_step = tokens_per_step
    num_tokens = len(ids_of(tokenizer, TEXT))
    body = {"model": "m", "prompt": [TEXT, "hello there"], "max_tokens": num_tokens, "n": num_choices, "temperature": 0}
    whole = front.ask("/v1/completions", body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * num_choices))
    assert [choice["text"] for choice in whole["choices"][:num_choices]] == [TEXT] * num_choices
    assert whole["usage"]["prompt_tokens"] == num_tokens + len(ids_of(tokenizer, "hello there"))
    assert whole["usage"]["completion_tokens"] == 2 * num_choices * num_tokens
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
    events = front.stream("/v1/completions", {**body, "stream_options": {"include_usage": usage} if usage else None})
    choices, streamed_usage = collect_openai(events, 2 * num_choices, usage, chat=False)
    assert [choice.text for choice in choices] == [choice["text"] for choice in whole["choices"]]
    assert [choice.finish_reason for choice in choices] == ["length"] * 2 * num_choices
    if usage:
        assert streamed_usage == whole["usage"]


def test_completion_defaults(front):
    front.ask("/v1/completions", {"prompt": "hello"})
    (request,) = front.wait_received(GenerateRequest, 1)
    assert request.sampling.max_new_tokens == 16
    assert request.sampling.temperature == 1.0


@pytest.mark.parametrize("prompt", [[504, 3575], [[504, 3575]], ["The capital"]])
def test_forms_of_a_prompt(front, prompt):
    answer = front.ask("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert [choice["text"] for choice in answer["choices"]] == ["The capital"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(front, stream):
    body = {"prompt": "The capital of France is", "echo": True, "logprobs": 2, "max_tokens": 1}
    if stream:
        (choice,), _ = collect_openai(front.stream("/v1/completions", body), 1, False, chat=False)
        text, logprobs = choice.text, {key: sum((part[key] for part in choice.logprobs), []) for key in choice.logprobs[0]}
    else:
        choice = front.ask("/v1/completions", body)["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "The capital of France isThe"
    assert logprobs["tokens"] == ["The", " capital", " of", " France", " is", "The"]
    assert logprobs["token_logprobs"] == [None, *(logprob_of(token) for token in (3575, 282, 4649, 314, 504))]
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) == 2
    assert logprobs["text_offset"] == [0, 3, 11, 14, 21, 24]


def test_echo_of_ids_is_their_text(front):
    assert front.ask("/v1/completions", {"prompt": [504, 3575], "echo": True, "max_tokens": 1})["choices"][0]["text"] == "The capitalThe"


def test_completion_stop(front, tokenizer):
    ids = [ids_of(tokenizer, character)[0] for character in "one two three"]
    choice = front.ask("/v1/completions", {"prompt": ids, "max_tokens": 13, "stop": [" t", "zz"]})["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("one", "stop", " t")
    events = front.stream("/v1/completions", {"prompt": ids, "max_tokens": 13, "stop": [" t", "zz"], "stream_options": {"include_usage": True}})
    (streamed,), usage = collect_openai(events, 1, True, chat=False)
    assert (streamed.text, streamed.finish_reason, streamed.matched_stop) == ("one", "stop", " t")
    assert usage["completion_tokens"] == 5


def test_no_event_without_choices_unless_asked_for(front):
    assert all(event["choices"] for event in front.stream("/v1/completions", {"prompt": "hello", "max_tokens": 3}))


def test_continuous_usage(front):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = front.stream("/v1/completions", {"prompt": [504], "max_tokens": 3, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events][-1] == 3
    assert all(event["usage"]["prompt_tokens"] == 1 for event in events)


def test_same_seed_on_every_route(front):
    front.ask("/v1/completions", {"prompt": [504], "max_tokens": 1, "seed": 0})
    front.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "seed": 0})
    front.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 1, "sampling_seed": 0}})
    assert [request.sampling.seed for request in front.wait_received(GenerateRequest, 3)] == [0, 0, 0]
    front.ask("/v1/completions", {"prompt": [504], "max_tokens": 1})
    front.ask("/v1/completions", {"prompt": [504], "max_tokens": 1})
    seeds = [request.sampling.seed for request in front.wait_received(GenerateRequest, 5)][3:]
    assert seeds[0] != seeds[1], "without a seed every request has its own"


# --- chat --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_choices", [1, 2, 4])
def test_chat_stream_equals_answer(front, tokenizer, num_choices):
    prompt = chat_ids(tokenizer, TEXT)
    fields = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": len(prompt), "n": num_choices, "ignore_eos": True}
    fields["skip_special_tokens"] = False
    whole = front.ask("/v1/chat/completions", fields)
    assert [choice["message"]["content"] for choice in whole["choices"]] == [tokenizer.decode(np.array(prompt))] * num_choices
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 2
    events = front.stream("/v1/chat/completions", {**fields, "stream_options": {"include_usage": True}})
    choices, usage = collect_openai(events, num_choices, True, chat=True)
    assert all(choice.roles == ["assistant"] for choice in choices)
    assert [choice.text for choice in choices] == [choice["message"]["content"] for choice in whole["choices"]]
    assert usage == whole["usage"]


def test_openai_client(front, client):
    model = client.models.list().data[0]
    assert model.owned_by == "sglane" and model.max_model_len == 1024
    assert client.models.retrieve(model.id).id == model.id
    chunks = list(client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4, stream=True, stream_options={"include_usage": True}
    ))
    assert chunks[-1].usage.completion_tokens <= 4
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "hi"}], temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing-of-the-kind")
    with pytest.raises(openai.InternalServerError, match="queue is full"):
        client.completions.create(model=model.id, prompt=[QUEUE_FULL])


def test_contents_as_parts(front, tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    front.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    front.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 1})
    first, second = front.wait_received(GenerateRequest, 2)
    assert first.input_ids == second.input_ids


def test_continue_final_message(front, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    front.ask("/v1/chat/completions", {"messages": messages, "continue_final_message": True, "max_tokens": 1})
    (request,) = front.wait_received(GenerateRequest, 1)
    assert tokenizer.decode(np.frombuffer(request.input_ids, np.int32)).endswith("<|im_start|>assistant\nThe answer is")
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert front.post("/v1/chat/completions", both).status_code == 400


def test_a_long_prompt_leaves_the_loop(front):
    """More text than is tokenized inline."""
    response = front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 3000}]})
    assert response.status_code == 400
    assert "512 tokens" in response.json()["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(front, stream):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    if stream:
        (choice,), _ = collect_openai(front.stream("/v1/chat/completions", body), 1, False, chat=True)
        content = sum((part["content"] for part in choice.logprobs), [])
    else:
        content = front.ask("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert content[0]["token"] == "<|im_start|>" and content[0]["bytes"] == list(b"<|im_start|>")
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]


def test_chat_without_max_tokens_takes_what_fits(front, tokenizer):
    front.planner.hold()
    front.behaviour.tokens_per_step = 1000
    front.planner.go_on()
    front.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": None, "ignore_eos": True})
    (request,) = front.wait_received(GenerateRequest, 1)
    assert request.sampling.max_new_tokens == 512 - len(chat_ids(tokenizer, "hi"))


def test_stop_in_chat_stream_with_several_choices(front, tokenizer):
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "stop": ["system"], "skip_special_tokens": False, "ignore_eos": True}
    choices, _ = collect_openai(front.stream("/v1/chat/completions", body), 3, False, chat=True)
    assert [(choice.text, choice.finish_reason, choice.matched_stop) for choice in choices] == [("<|im_start|>", "stop", "system")] * 3


def test_cached_token_details(front):
    answer = front.ask("/v1/completions", {"prompt": [504] * 10, "max_tokens": 1, "return_cached_tokens_details": True})
    assert answer["sglext"]["cached_tokens_details"] == {"device": 5, "host": 0}
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


@pytest.mark.parametrize("path, prompt", [("/v1/completions", {"prompt": [504] * 10}),
                                          ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})])
def test_cached_token_details_in_streams(front, path, prompt):
    """With the last chunk of the choice, though no usage chunk was asked for."""
    chunks = list(front.stream(path, {**prompt, "max_tokens": 3, "ignore_eos": True, "return_cached_tokens_details": True}))
    with_details = [chunk for chunk in chunks if isinstance(chunk, dict) and "sglext" in chunk]
    assert len(with_details) == 1 and with_details[0]["choices"][0]["finish_reason"] == "length"
    assert with_details[0]["sglext"]["cached_tokens_details"]["device"] > 0


def test_a_model_without_template(front, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "_template", None)
    response = front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert response.status_code == 400
    assert "chat template" in response.json()["message"]


def test_a_template_that_refuses(front, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "_template", "{{ raise_exception('roles must alternate') }}")
    response = front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["message"] and response.json()["param"] == "messages"
