"""/metrics over real HTTP: names, sums equal to the sums of answers, gauges of lanes, scrapes of a silent engine."""
import math
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kits.fake_planner import QUEUE_FULL, STATE
from kits.front import Front


@pytest.fixture(scope="module")
def measured(config, tokenizer):
    with Front(config, tokenizer, enable_metrics=True) as running:
        yield running


@pytest.fixture(autouse=True)
def rested(measured):
    measured.calm()


def scrape(front):
    """{(name, labels that vary): value}."""
    answer = front.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name.removeprefix("sglang:"), tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(samples, name, **labels):
    chosen = [value for (key, pairs), value in samples.items() if key == name and labels.items() <= dict(pairs).items()]
    assert chosen, f"no sample of {name} with {labels}"
    return sum(chosen)


def difference(before, after, name, **labels):
    return total(after, name, **labels) - total(before, name, **labels)


def test_counters_are_the_sums_of_the_answers(measured):
    before = scrape(measured)
    bodies = [{"input_ids": [504] * length, "sampling_params": {"max_new_tokens": length + 1, "n": 1 + length % 2}} for length in (1, 4, 9)]
    answers = []
    for body in bodies:
        answer = measured.ask("/generate", body)
        answers += answer if isinstance(answer, list) else [answer]
        events = measured.stream("/generate", body)
        last = {event.get("index", 0): event for event in events}
        answers += last.values()
    assert measured.http.get("/health_generate").status_code == 200  # a probe does not change the sums
    after = scrape(measured)
    metas = [answer["meta_info"] for answer in answers]
    for name, key in (("prompt_tokens_total", "prompt_tokens"), ("generation_tokens_total", "completion_tokens")):
        assert difference(before, after, name) == sum(meta[key] for meta in metas), name
    assert difference(before, after, "cached_tokens_total", cache_source="device") == sum(meta["cached_tokens"] for meta in metas)
    assert difference(before, after, "cached_tokens_total", cache_source="host") == 0
    assert difference(before, after, "num_requests_total") == len(metas)
    assert difference(before, after, "num_requests_total", is_streaming="true") == len(metas) / 2
    assert difference(before, after, "num_aborted_requests_total") == 0
    assert difference(before, after, "time_to_first_token_seconds_count") == len(metas)
    assert difference(before, after, "e2e_request_latency_seconds_count") == len(metas)
    assert difference(before, after, "inter_token_latency_seconds_count") == sum(meta["completion_tokens"] - 1 for meta in metas)
    assert measured.state.tracker.num_records == 0


def test_a_stop_string_counts_what_the_answer_has(measured, tokenizer):
    before = scrape(measured)
    measured.behaviour.tokens_per_step = 8
    ids = [tokenizer.encode(character, add_special_tokens=False).tolist()[0] for character in "abcdefgh"]
    answer = measured.ask("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "stop": "cd"}})
    assert difference(before, scrape(measured), "generation_tokens_total") == answer["meta_info"]["completion_tokens"] == 4


def test_what_ends_early_is_counted_as_aborted(measured):
    before = scrape(measured)
    full = measured.post("/generate", {"input_ids": [QUEUE_FULL]})
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    measured.behaviour.step_s = 0.05
    with pytest.raises(httpx.ReadTimeout):
        measured.post("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 400}}, timeout=0.2)
    assert measured.wait_idle()
    after = scrape(measured)
    assert difference(before, after, "num_aborted_requests_total") == difference(before, after, "num_requests_total") == 2
    assert difference(before, after, "e2e_request_latency_seconds_count") == 0


def test_the_planners_figures(measured):
    samples = scrape(measured)
    assert total(samples, "num_queue_reqs", tp_rank="0") == 2 and total(samples, "num_running_reqs") == 0
    assert total(samples, "kv_available_tokens") == 190 * 16 and total(samples, "kv_evictable_tokens") == 4096 - 190 * 16 - 512
    assert total(samples, "cache_hit_rate") == 0.25 and total(samples, "num_retractions_total") == 3
    assert total(samples, "fallbacks_total", fallback="tail_copy_skipped") == 2
    for kind, counts in STATE["kv_ledger"]["device"].items():
        for lane, count in enumerate(counts):
            assert total(samples, f"cp_lane_{kind}_pages", cp_lane=str(lane)) == count
    buckets = {dict(pairs)["le"]: value for (name, pairs), value in samples.items() if name == "queue_time_seconds_bucket"}
    assert buckets == {"0.01": 3, "0.1": 4, "+Inf": 5}
    assert total(samples, "queue_time_seconds_count") == 5 and total(samples, "queue_time_seconds_sum") == 2.5


def test_every_sample_is_finite_and_has_the_model(measured, config):
    for (name, pairs), value in scrape(measured).items():
        assert math.isfinite(value), name
        assert name.startswith("http_") or dict(pairs)["model_name"] == measured.state.model_name
    assert not any(name.endswith("_created") for name, _ in scrape(measured))


def test_http_counts(measured):
    before = scrape(measured)
    assert measured.http.get("/made-up/path").status_code == 404
    assert measured.post("/generate", {}).status_code == 400
    measured.http.get("/v1/models/none")
    after = scrape(measured)
    assert total(after, "http_responses_total", endpoint="other", status_code="404") >= 1
    assert difference(before, after, "http_requests_total", endpoint="/generate", method="POST") == 1
    assert total(after, "http_responses_total", endpoint="/generate", status_code="400") >= 1
    assert total(after, "http_responses_total", endpoint="/v1/models/{model}", status_code="404") >= 1
    assert total(after, "http_requests_active") == 1, "the scrape itself"
    assert not any("made-up" in str(pairs) for _, pairs in after)


def test_head(measured):
    for path in ("/metrics", "/health", "/ready", "/ping"):
        answer = measured.http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path


def test_a_silent_engine_does_not_hang_the_scrape(config, tokenizer):
    with Front(config, tokenizer, enable_metrics=True) as front:
        front.behaviour.is_deaf = True
        start_s = time.monotonic()
        samples = scrape(front)
        assert time.monotonic() - start_s < 10
        assert total(samples, "num_requests_total") == 0
        assert not any(name == "num_running_reqs" for name, _ in samples)


def test_without_the_flag_there_is_nothing(front):
    assert front.http.get("/metrics").status_code == 404
