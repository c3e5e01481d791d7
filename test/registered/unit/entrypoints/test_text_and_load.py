"""The tokenizer's own routes, and what the engine says about its load."""
import pytest

from kits.fake_planner import STATE
from kits.front import Front


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("text", ["The capital of France is", "", "日本語 \U0001f600", "long " * 2000])
def test_there_and_back(front, tokenizer, prefix, text):
    answer = front.ask(f"{prefix}/tokenize", {"model": "any", "prompt": text, "add_special_tokens": False})
    assert answer == {"tokens": tokenizer.encode(text, add_special_tokens=False).tolist(), "count": len(answer["tokens"]), "max_model_len": 1024}
    assert front.ask(f"{prefix}/detokenize", {"model": "any", "tokens": answer["tokens"]}) == {"text": text}


def test_batches(front):
    answer = front.ask("/tokenize", {"prompt": ["one", "one two"]})
    assert answer["count"] == [len(ids) for ids in answer["tokens"]] == [1, 2]
    assert front.ask("/detokenize", {"tokens": answer["tokens"]}) == {"text": ["one", "one two"]}


def test_special_tokens_are_skipped_unless_asked_for(front, config):
    tokens = [504, config.eos_token_ids[0]]
    assert front.ask("/detokenize", {"tokens": tokens}) == {"text": "The"}
    assert front.ask("/detokenize", {"tokens": tokens, "skip_special_tokens": False}) == {"text": "The<|im_end|>"}


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"prompt": ["a", 3]}, "prompt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
    ("/detokenize", {"tokens": [[3], 4]}, "tokens"),
])
def test_wrong_bodies_name_the_field(front, path, body, field):
    answer = front.post(path, body)
    assert (answer.status_code, answer.json()["param"]) == (400, field)


def test_without_a_tokenizer(config):
    with Front(config, None) as front:
        assert front.post("/tokenize", {"prompt": "a"}).status_code == 400
        assert front.post("/detokenize", {"tokens": [1]}).status_code == 400


def test_loads(front):
    body = front.http.get("/v1/loads").json()
    (load,) = body["loads"]
    assert body["num_accelerators"] == 1 and body["version"]
    assert load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 2
    assert load["cache_hit_rate"] == 0.25 and load["num_total_tokens"] == 545
    assert "memory" not in load
    (load,) = front.http.get("/v1/loads?include=all").json()["loads"]
    assert load["memory"]["lanes"] == STATE["kv_ledger"]["device"]
    assert load["memory"]["lane_work"] == STATE["lanes"] and load["totals"]["stalls"] == 4
    assert load["memory"]["host_lanes"] == STATE["kv_ledger"]["host"] and load["memory"]["host_cache"] == STATE["host_cache"]
    assert load["memory"]["sessions"] == STATE["sessions"]
    assert load["queues"] == {"waiting": 2, "retracted": 3} and load["spec"] == {"accept_length": 2.5, "accept_rate": 0.6}


def test_loads_as_text(front):
    answer = front.http.get("/v1/loads?format=prometheus")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'sglang:token_usage{model_name="' in answer.text
    samples = [line for line in answer.text.splitlines() if not line.startswith("#")]
    assert all(float(line.rpartition(" ")[2]) >= 0 for line in samples) and len(samples) >= 10


@pytest.mark.parametrize(("query", "field"), [("include=core,lanes", "include"), ("format=xml", "format"), ("dp_rank=1", "dp_rank")])
def test_loads_refuses(front, query, field):
    answer = front.http.get(f"/v1/loads?{query}")
    assert (answer.status_code, answer.json()["param"]) == (400, field)


def test_get_load(front):
    assert front.http.get("/get_load").json() == [{"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 2, "num_tokens": 545}]
