"""POST /generate over real HTTP; the planner behind it echoes the prompt."""
import threading
import time

import numpy as np
import pytest

from kits.fake_planner import GIVE_UP, QUEUE_FULL, logprob_of
from kits.front import Front
from kits.sse import collect_native
from sglane.plan.io_struct import FinishRequest, GenerateRequest

TEXTS = ["The capital of France is", "Příliš žluťoučký kůň", "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 done", "日本語のテキスト"]


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).tolist()


def without_times(answer):
    return {**answer, "meta_info": {key: value for key, value in answer["meta_info"].items() if key not in ("id", "e2e_latency")}}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_stream_equals_answer(front, tokenizer, text, tokens_per_step):
    front.behaviour.tokens_per_step = tokens_per_step
    ids = ids_of(tokenizer, text)
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": len(ids)}}
    whole = front.ask("/generate", body)
    assert whole["text"] == text
    assert whole["output_ids"] == ids
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": len(ids)}
    assert whole["meta_info"]["prompt_tokens"] == whole["meta_info"]["completion_tokens"] == len(ids)
    events = front.stream("/generate", body)
    (last,) = collect_native(events, 1)
    assert without_times(last) == without_times(whole)
    for event in events:
        assert text.startswith(event["text"]), "half a character, or text that changes"


@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.parametrize("keep", [False, True])
def test_stop_string_at_every_place(front, tokenizer, cut, keep):
    """Output one character a token; the stop begins `cut` characters in and is found wherever it lies."""
    text = "abcdefghijkl STOP and more"
    text = text[:cut] + "STOP" + text[cut:]
    ids = [ids_of(tokenizer, character)[0] for character in text]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": len(ids), "stop": ["STOPPED", "STOP", "zzz"], "no_stop_trim": keep}}
    whole = front.ask("/generate", body)
    assert whole["text"] == text[:cut] + ("STOP" if keep else "")
    assert whole["output_ids"] == ids[: cut + 4]
    assert whole["meta_info"]["completion_tokens"] == cut + 4
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP"}
    (last,) = collect_native(front.stream("/generate", body), 1)
    assert without_times(last) == without_times(whole)
    assert front.wait_received(FinishRequest, 2)[-1].num_output_tokens == cut + 4


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5, 50])
def test_stop_does_not_depend_on_grouping(front, tokenizer, tokens_per_step):
    front.behaviour.tokens_per_step = tokens_per_step
    ids = [ids_of(tokenizer, character)[0] for character in "one aab two"]
    answer = front.ask("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 11, "stop": ["ab", "aab"]}})
    assert (answer["text"], answer["output_ids"]) == ("one ", ids[:7])


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_expression(front, tokenizer, tokens_per_step, keep):
    front.behaviour.tokens_per_step = tokens_per_step
    text = "one 12 two 345, three"
    ids = [ids_of(tokenizer, character)[0] for character in text]
    sampling = {"max_new_tokens": len(ids), "stop_regex": ["[0-9]{3}", "four"], "stop": "three", "no_stop_trim": keep}
    body = {"input_ids": ids, "sampling_params": sampling}
    whole = front.ask("/generate", body)
    assert whole["text"] == "one 12 two " + ("345" if keep else "")
    assert (whole["output_ids"], whole["meta_info"]["finish_reason"]) == (ids[:14], {"type": "stop", "matched": "[0-9]{3}"})
    events = front.stream("/generate", body)
    (last,) = collect_native(events, 1)
    assert without_times(last) == without_times(whole)
    assert not any("3" in event["text"] for event in events[:-1]), "a beginning of the match was sent"


def test_a_slow_stop_expression_ends_its_own_request_only(front, tokenizer):
    ids = ids_of(tokenizer, "a")
    answer = front.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 300, "stop_regex": "(a|aa)+c"}})
    assert answer.status_code == 400 and "takes too long" in answer.json()["message"]
    assert front.wait_received(FinishRequest, 1) and front.wait_idle()
    assert front.ask("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 3}})["text"] == "aaa"


def test_min_new_tokens_delays_stop_strings(front, tokenizer):
    ids = [ids_of(tokenizer, character)[0] for character in "aXbXcX"]
    answer = front.ask("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 6, "min_new_tokens": 3, "stop": "X"}})
    assert answer["text"] == "aXb"


def test_stop_token_is_counted_but_not_shown(front, tokenizer):
    ids = ids_of(tokenizer, "The capital of France is")
    sampling = {"max_new_tokens": 20, "stop_token_ids": [ids[2]]}
    answer = front.ask("/generate", {"input_ids": ids, "sampling_params": sampling})
    assert (answer["text"], answer["output_ids"]) == ("The capital", ids[:3])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[2]}
    kept = front.ask("/generate", {"input_ids": ids, "sampling_params": {**sampling, "no_stop_trim": True}})
    assert kept["text"] == "The capital of"


def test_end_token_of_the_model_and_ignore_eos(front, config):
    eos = config.eos_token_ids[0]
    stopped = front.ask("/generate", {"input_ids": [504, eos, 3575], "sampling_params": {"max_new_tokens": 3}})
    assert (stopped["text"], stopped["output_ids"], stopped["meta_info"]["finish_reason"]["matched"]) == ("The", [504, eos], eos)
    ignored = front.ask("/generate", {"input_ids": [504, eos, 3575], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}})
    assert ignored["text"] == "The capital"
    assert ignored["meta_info"]["finish_reason"]["type"] == "length"


def test_limits_are_clamped_to_what_fits(front):
    front.ask("/generate", {"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 100}})
    assert front.wait_received(GenerateRequest, 1)[0].sampling.max_new_tokens == 12
    refused = front.post("/generate", {"input_ids": [5] * 512})
    assert refused.status_code == 400
    assert "512 tokens" in refused.json()["message"] and refused.json()["param"] == "input_ids"


def test_default_is_128_new_tokens(front):
    front.ask("/generate", {"text": "hello"})
    assert front.wait_received(GenerateRequest, 1)[0].sampling.max_new_tokens == 128


def test_no_new_tokens_computes_the_prompt_only(front):
    body = {"input_ids": [504, 3575], "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    answer = front.ask("/generate", body)
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["input_token_logprobs"]) == 2
    assert answer["meta_info"]["output_token_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2, 4])
def test_batches_and_choices(front, tokenizer, stream, num_choices):
    texts = TEXTS[:3]
    body = {"text": texts, "sampling_params": [{"max_new_tokens": len(ids_of(tokenizer, text)), "n": num_choices} for text in texts]}
    found = collect_native(front.stream("/generate", body), 3 * num_choices) if stream else front.ask("/generate", body)
    assert [answer["text"] for answer in found] == [text for text in texts for _ in range(num_choices)]


def test_one_prompt_with_choices_is_a_list_with_seeds_in_order(front):
    found = front.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 1, "n": 3, "sampling_seed": 40}})
    assert len(found) == 3
    assert [request.sampling.seed for request in front.wait_received(GenerateRequest, 3)] == [40, 41, 42]


def test_batch_of_ids_with_names(front):
    found = front.ask("/generate", {"input_ids": [[504, 3575], [504]], "rid": ["eins", "zwei"], "sampling_params": {"max_new_tokens": 1}})
    assert [answer["meta_info"]["id"] for answer in found] == ["eins", "zwei"]


@pytest.mark.parametrize("start", [0, 2, 4, 5, -1])
def test_logprobs(front, start):
    ids = [504, 3575, 282, 4649, 314]
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2, "token_ids_logprob": [9, 10],
            "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 3}}
    answer = front.ask("/generate", body)
    meta = answer["meta_info"]
    expected = [] if start == -1 else ids[start:]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == expected
    for position, entry in enumerate(meta["input_token_logprobs"], start=max(start, 0)):
        assert entry[0] == (None if position == 0 else logprob_of(ids[position]))
    assert meta["input_token_logprobs_length"] == len(meta["input_top_logprobs"]) == len(meta["input_token_ids_logprobs"]) == len(expected)
    assert meta["output_token_logprobs"] == [[logprob_of(504), 504, "The"], [logprob_of(3575), 3575, " capital"], [logprob_of(282), 282, " of"]]
    assert [entry[1] for entry in meta["output_top_logprobs"][0]] == [504, 505]
    assert [entry[:2] for entry in meta["output_token_ids_logprobs"][0]] == [[logprob_of(9), 9], [logprob_of(10), 10]]
    (last,) = collect_native(front.stream("/generate", body), 1)
    assert without_times(last) == without_times(answer)


def test_logprobs_end_where_a_stop_string_ends(front, tokenizer):
    front.behaviour.tokens_per_step = 6
    ids = [ids_of(tokenizer, character)[0] for character in "abXcde"]
    answer = front.ask("/generate", {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 6, "stop": "X"}})
    assert len(answer["meta_info"]["output_token_logprobs"]) == answer["meta_info"]["completion_tokens"] == 3


def test_stream_interval(front):
    front.behaviour.step_s = 0.01
    body = {"input_ids": [504] * 5, "sampling_params": {"max_new_tokens": 10, "ignore_eos": True, "stream_interval": 4}}
    assert [event["meta_info"]["completion_tokens"] for event in front.stream("/generate", body)] == [1, 5, 9, 10]


def test_namespaces_and_priority_reach_the_planner(front):
    nulls = {"cache_salt": None, "extra_key": None, "priority": 7}
    bodies = [{}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"}, nulls]
    for body in bodies:
        front.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 1}, **body})
    requests = front.wait_received(GenerateRequest, 5)
    assert len({request.namespace for request in requests[:4]}) == 4
    assert requests[4].namespace == "" and requests[4].priority == 7


def test_nulls_and_unknown_keys_are_fine(front):
    nulls = dict.fromkeys(["text", "model", "rid", "stream", "return_logprob", "bootstrap_host", "bootstrap_room", "lora_path", "image_data"])
    sampling = {"max_new_tokens": 1, "custom_params": {"a": 1}, **dict.fromkeys(["temperature", "top_p", "stop", "n", "json_schema", "logit_bias"])}
    body = {**nulls, "input_ids": [504], "return_hidden_states": False, "log_metrics": True, "background": False, "never_heard_of": {"x": [1]},
            "sampling_params": sampling}
    assert front.ask("/generate", body)["output_ids"] == [504]


def test_put_is_post(front):
    assert front.http.put("/generate", json={"input_ids": [504], "sampling_params": {"max_new_tokens": 1}}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_is_503_with_retry_after(front, stream):
    response = front.post("/generate", {"input_ids": [QUEUE_FULL], "stream": stream})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "queue is full" in response.json()["error"]["message"]
    mixed = front.post("/generate", {"input_ids": [[504] * 3, [QUEUE_FULL]], "sampling_params": {"max_new_tokens": 400}})
    assert mixed.status_code == 503
    assert front.wait_idle(), "the other prompt of the batch goes on"


def test_without_tokenizer(config):
    with Front(config, None) as front:
        answer = front.ask("/generate", {"input_ids": [504, 3575], "sampling_params": {"max_new_tokens": 2}})
        assert "text" not in answer and answer["output_ids"] == [504, 3575]
        bodies = [
            ("/generate", {"text": "hi"}), ("/generate", {"input_ids": [1], "sampling_params": {"stop": "x"}}), ("/v1/completions", {"prompt": "hi"}),
            ("/generate", {"input_ids": [1], "sampling_params": {"stop_regex": "x"}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ]
        for path, body in bodies:
            response = front.post(path, body)
            assert response.status_code == 400, (path, response.text)
            assert "skip-tokenizer-init" in response.json()["message"]


def test_fatal_reaches_the_front(config):
    with Front(config, None) as front:
        client = front.state.engine().client
        front.planner.hold()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(front.post("/generate", {"input_ids": [GIVE_UP]})))
        thread.start()
        deadline = time.monotonic() + 5
        while not client.fatal.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "made-up" in client.fatal.result()
        front.on_loop(lambda: client.fail_all("the engine has failed: made-up"))
        thread.join(5)
        assert answers[0].status_code == 503 and "made-up" in answers[0].json()["message"]
        assert front.post("/generate", {"input_ids": [1]}).status_code == 503


def test_output_arrays_are_int32(front):
    front.ask("/generate", {"input_ids": [504, 3575], "sampling_params": {"max_new_tokens": 1}})
    assert np.frombuffer(front.wait_received(GenerateRequest, 1)[0].input_ids, np.int32).tolist() == [504, 3575]
