"""/metrics over real HTTP: names, sums equal to the sums of answers, gauges of lanes, scrapes of a silent engine."""
import math
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kits.fake_planner import QUEUE_FULL, STATE
from kits.front import Front
from sglane.entrypoints.meta_info import times_of
from sglane.observability.requests import Record
from sglane.plan.io_struct import GenerateRequest, SamplingParams


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


def test_stages_and_times_of_an_answer(measured):
    before = scrape(measured)
    measured.behaviour.step_s = 0.02
    earliest = time.time()
    meta = measured.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 4}})["meta_info"]
    latest, after = time.time(), scrape(measured)
    for stage in ("tokenize", "prefill_forward", "decode_loop"):
        assert difference(before, after, "per_stage_req_latency_seconds_count", stage=stage) == 1
    decode_s = difference(before, after, "per_stage_req_latency_seconds_sum", stage="decode_loop")
    assert decode_s >= 0.05 and meta["decode_throughput"] == pytest.approx(3 / decode_s)
    names = ("request_received_ts", "api_server_dispatch_finish_ts", "prefill_finished_time", "request_finished_ts", "response_sent_to_client_ts")
    moments = [earliest, *(meta[name] for name in names), latest]
    assert all(first <= second + 1e-3 for first, second in zip(moments, moments[1:])), moments
    assert meta["first_token_latency"] == pytest.approx(meta["prefill_finished_time"] - meta["request_received_ts"], abs=1e-3)
    assert "queue_time" not in meta, "this planner does not say"
    chunks = measured.stream("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 3}})
    assert ["request_finished_ts" in chunk["meta_info"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_queue_is_told_where_the_planner_says_it():
    record = Record(GenerateRequest(rid="a", input_ids=b"", sampling=SamplingParams(max_new_tokens=1)), "a", False, 10.0, 11.0, None, queue_s=2.0)
    times = times_of(record, 20.0, 1020.0)
    assert times == {"request_received_ts": 1010.0, "api_server_dispatch_finish_ts": 1011.0, "request_finished_ts": 1020.0,
                     "response_sent_to_client_ts": 1020.0, "queue_time": 2.0, "forward_entry_time": 1013.0}


def test_without_metrics_answers_tell_no_times(front):
    meta = front.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 2}})["meta_info"]
    assert "e2e_latency" in meta and not {"request_received_ts", "decode_throughput"} & set(meta)


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
    for tier, prefix in (("device", ""), ("host", "host_")):
        for kind, counts in STATE["kv_ledger"][tier].items():
            for lane, count in enumerate(counts):
                assert total(samples, f"cp_lane_{prefix}{kind}_pages", cp_lane=str(lane)) == count
    lanes = STATE["lanes"]
    for name, key in (("cp_lane_homes", "homes"), ("cp_lane_home_moves_total", "home_moves"), ("cp_lane_evicted_pages_total", "evicted_pages"),
                      ("cp_lane_computed_tokens_total", "computed_tokens"), ("cp_lane_prefix_wait_seconds_total", "prefix_wait_seconds")):
        assert [total(samples, name, cp_lane=str(lane)) for lane in (0, 1)] == lanes[key]
    assert total(samples, "cp_busiest_lane_tokens_total") == 200 and total(samples, "stalls_total") == 4
    assert total(samples, "cp_lane_page_waits_total", cp_lane="1", reason="short") == 2
    assert total(samples, "cp_lane_page_waits_total", cp_lane="any", reason="pending") == 5
    assert total(samples, "page_wait_seconds_count") == 7 and total(samples, "page_wait_seconds_sum") == 1.5
    assert total(samples, "num_retracted_reqs") == 1 and total(samples, "num_paused_reqs") == 0 and total(samples, "evicted_tokens_total") == 640
    modes = {mode: total(samples, "realtime_tokens_total", mode=mode) for mode in ("prefill_compute", "prefill_cache", "decode")}
    assert modes == {"prefill_compute": 300, "prefill_cache": 100, "decode": 50}
    assert total(samples, "eviction_duration_seconds_count") == 3 and total(samples, "eviction_duration_seconds_sum") == 0.006
    buckets = {dict(pairs)["le"]: value for (name, pairs), value in samples.items() if name == "queue_time_seconds_bucket"}
    assert buckets == {"0.01": 3, "0.1": 4, "+Inf": 5}
    assert total(samples, "queue_time_seconds_count") == 5 and total(samples, "queue_time_seconds_sum") == 2.5


def test_the_host_tiers_figures(measured):
    samples = scrape(measured)
    assert total(samples, "hicache_host_total_tokens") == 512 * 16 and total(samples, "hicache_host_used_tokens") == (56 + 66) * 16
    for prefix, kind in (("hicache_backup", "backup"), ("load_back", "load")):
        ticket = STATE["host_cache"]["tickets"][kind]
        assert total(samples, f"{prefix}_tokens_total") == ticket["tokens"] and total(samples, f"{prefix}_bytes_total") == ticket["bytes"]
        assert total(samples, f"{prefix}_duration_seconds_sum") == ticket["times"]["sum_s"]
        assert total(samples, f"{prefix}_duration_seconds_bucket", le="0.1") == sum(ticket["times"]["counts"][:2])
        assert total(samples, f"{prefix}_duration_seconds_count") == sum(ticket["times"]["counts"])
    for reason, num_tokens in STATE["host_cache"]["dropped_tokens"].items():
        assert total(samples, "hicache_dropped_tokens_total", reason=reason, pool="kv") == num_tokens
    assert total(samples, "hicache_duplicate_pages_total") == 7 and total(samples, "hicache_open_tickets") == 2


def test_the_sessions_figures(measured):
    samples = scrape(measured)
    assert [total(samples, name) for name in ("num_open_sessions", "num_leased_sessions", "session_leased_tokens")] == [4, 2, 96]


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
