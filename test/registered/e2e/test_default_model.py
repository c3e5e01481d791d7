"""The default model behind a real server: sensible answers, stream equals non-stream, exact books."""
import openai
import pytest

from kits.audit import assert_clean, assert_empty, wait_idle
from kits.canary import Canary
from kits.server import Server

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def server():
    with Server("--dtype", "float32", "--max-total-tokens", "8192", "--enable-cache-report") as running:
        yield running


@pytest.fixture(autouse=True)
def books_balance(server):
    yield
    assert_clean(wait_idle(server))


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_models(client):
    models = client.models.list().data
    assert len(models) == 1
    assert models[0].object == "model"
    assert models[0].owned_by == "sglane"
    assert models[0].max_model_len == 8192


def test_chat_answers(client, model):
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 32
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_equals_answer(client, model):
    fields = {"model": model, "messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0, "max_tokens": 48}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_stop_string(client, model):
    fields = {"model": model, "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 32}
    free = client.completions.create(**fields).choices[0].text
    assert " 9" in free
    cut = client.completions.create(**fields, stop=[" 9"]).choices[0]
    assert cut.text == free[:free.index(" 9")]
    assert cut.finish_reason == "stop"


def test_native_stream_is_cumulative(server):
    body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
    whole = server.ask("/generate", body)
    assert whole["meta_info"]["completion_tokens"] == 12
    assert whole["meta_info"]["finish_reason"]["type"] == "length"
    events = list(server.stream("/generate", body))
    for earlier, later in zip(events, events[1:], strict=False):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][:len(earlier["output_ids"])] == earlier["output_ids"]
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]


def test_cached_tokens_are_exact(server):
    """A repeated prompt is found to the token, but for the last one, which must be fed to have something to sample from."""
    server.flush_cache()
    prompt = [1, *range(1000, 1149)]
    cold = server.generate(prompt, max_new_tokens=8, ignore_eos=True)
    wait_idle(server)
    warm = server.generate(prompt, max_new_tokens=8, ignore_eos=True)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] == len(prompt) - 1
    assert warm["output_ids"] == cold["output_ids"]
    assert_clean(wait_idle(server))


def test_cache_report(client, model):
    fields = {"model": model, "prompt": "A prompt that is asked twice, word for word, to see what is found again.", "temperature": 0, "max_tokens": 4}
    first, second = client.completions.create(**fields), client.completions.create(**fields)
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens - 1
    assert second.choices[0].text == first.choices[0].text


def test_flush_gives_every_page_back(server):
    server.generate("Something to cache before it is thrown away.", max_new_tokens=4)
    ledger = wait_idle(server)
    assert any(ledger["device"]["cached"])
    server.flush_cache()
    assert_empty(server.kv_ledger())


def test_batch_answers_equal_single_answers(server):
    canary = Canary.record(server)
    texts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "2 + 2 ="]
    alone = [server.generate(text, max_new_tokens=16, ignore_eos=True)["output_ids"] for text in texts]
    together = server.ask("/generate", {"text": texts, "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}})
    assert [answer["output_ids"] for answer in together] == alone
    canary.check(server)


def test_a_disconnect_leaves_nothing_behind(server):
    stream = server.stream("/generate", {"text": "Count to a thousand: 1, 2,", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}})
    next(stream)
    stream.close()
    wait_idle(server, timeout_s=20.0)


@pytest.mark.parametrize(("body", "word"), [
    ({"messages": [{"role": "user", "content": "hi"}], "temperature": -1}, "temperature"),
    ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}, "max_"),
    ({"messages": []}, "messages"),
])
def test_a_mistake_is_a_400_that_names_the_field(server, body, word):
    response = server.post("/v1/chat/completions", {"model": "default", **body})
    assert response.status_code == 400, response.text
    assert word in response.json()["message"] or word in str(response.json())


def test_health_and_info(server):
    assert server.get("/health").status_code == 200
    assert server.get("/health_generate").status_code == 200
    info = server.get("/model_info").json()
    assert info["is_generation"] is True
    assert server.server_info()["internal_states"][0]["kv_ledger"]["cp_size"] == 1
    assert server.get("/get_server_info").status_code == 200
    assert server.get("/get_model_info").json() == info
