"""What users see of speculation: counts in answers, the limit of a request, /server_info, /metrics."""
import pytest

from kits.fake_planner import STATE
from kits.front import Front
from sglane.plan.io_struct import GenerateRequest, SpecCounts

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def speculating(config, tokenizer):
    with Front(config, tokenizer, enable_metrics=True, speculative_algorithm="NGRAM") as running:
        yield running


@pytest.fixture(autouse=True)
def rested(speculating):
    speculating.calm()


def test_counts_of_an_answer(speculating):
    body = {"input_ids": [504, 505], "sampling_params": {"max_new_tokens": 6}}
    assert not any(name.startswith("spec_") for name in speculating.ask("/generate", body)["meta_info"])
    speculating.behaviour.spec = SpecCounts(4, 10, 3, [2, 1, 1, 0])
    meta = speculating.ask("/generate", body)["meta_info"]
    assert (meta["spec_verify_ct"], meta["spec_accept_length"], meta["spec_accept_rate"]) == (4, 1.5, 0.3)
    assert (meta["spec_accept_token_num"], meta["spec_draft_token_num"], meta["spec_accept_histogram"]) == (3, 10, [2, 1, 1, 0])
    assert (meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"], meta["spec_correct_drafts_histogram"]) == (3, 10, [2, 1, 1, 0])
    speculating.behaviour.spec = SpecCounts(0, 0, 0, [0, 0, 0, 0])
    meta = speculating.ask("/generate", body)["meta_info"]
    assert (meta["spec_verify_ct"], meta["spec_accept_length"], meta["spec_accept_rate"]) == (0, 0.0, 0.0)


def bodies(fields):
    yield "/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 2, **fields}}
    yield "/v1/completions", {"prompt": [504], "max_tokens": 2, **fields}
    yield "/v1/chat/completions", {**CHAT, **fields}


@pytest.mark.parametrize(("fields", "max_drafts"), [({}, -1), ({"speculative_num_steps": None}, -1), ({"speculative_num_steps": 0}, 0),
                                                    ({"speculative_num_steps": 99}, 99)])
def test_limit_of_a_request(speculating, fields, max_drafts):
    for route, body in bodies(fields):
        speculating.ask(route, body)
        assert speculating.behaviour.received_of(GenerateRequest)[-1].sampling.max_drafts == max_drafts, route


@pytest.mark.parametrize("value", [-1, 1.5, "2", True, [1]])
def test_bad_limits_are_refused_by_name(speculating, value):
    for route, body in bodies({"speculative_num_steps": value}):
        answer = speculating.http.post(route, json=body)
        assert answer.status_code == 400 and "speculative_num_steps" in answer.text, route


def test_server_info(speculating):
    info = speculating.http.get("/server_info").json()
    assert (info["speculative_algorithm"], info["speculative_num_steps"], info["speculative_num_draft_tokens"]) == ("NGRAM", 7, 8)
    state = info["internal_states"][0]
    assert state["avg_spec_accept_length"] == 2.5 and state["speculation"] == STATE["speculation"]


def test_metrics(speculating):
    lines = speculating.http.get("/metrics").text.splitlines()
    found = {line.partition("{")[0] + "/" + line.partition('cache_source="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
             for line in lines if line.startswith("sglang:spec_")}
    assert found["sglang:spec_accept_length/"] == 2.5 and found["sglang:spec_accept_rate/"] == 0.6 and found["sglang:spec_num_steps/"] == 3
    for source, counts in STATE["speculation"]["by_source"].items():
        for name, key in (("verify_calls", "num_verify_steps"), ("draft_tokens", "num_drafts"), ("accepted_tokens", "num_accepted")):
            assert found[f"sglang:spec_{name}_total/{source}"] == counts[key]
