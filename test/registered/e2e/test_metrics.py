"""The metrics of a real engine on two lanes: sums of answers, gauges at rest, pages of every lane; JSON logs of all processes."""
import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kits.audit import wait_idle
from kits.checkpoints import tiny
from kits.server import Server


@pytest.fixture(scope="module")
def server():
    flags = ("--model-path", str(tiny("llama")), "--skip-tokenizer-init", "--dtype", "float32", "--page-size", "8", "--max-total-tokens", "512",
             "--cp-size", "2", "--enable-cp-shared-kv", "--enable-metrics", "--skip-server-warmup", "--log-format", "json")
    with Server(*flags) as running:
        yield running


def scrape(server):
    """name -> sum over all labels, and by lane."""
    sums, lanes = {}, {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("sglang:")
            sums[name] = sums.get(name, 0.0) + sample.value
            if "cp_lane" in sample.labels:
                lanes.setdefault(sample.labels["cp_lane"], {})[name] = sample.value
    return sums, lanes


def test_counters_and_gauges(server):
    prompt = [(7 * index) % 400 + 3 for index in range(90)]
    answers = [server.generate(prompt[:length], max_new_tokens=12, ignore_eos=True) for length in (30, 90, 90, 60)]
    wait_idle(server)
    time.sleep(5.0)  # longer than the window of the throughput
    sums, lanes = scrape(server)
    metas = [answer["meta_info"] for answer in answers]
    assert sum(meta["cached_tokens"] for meta in metas) > 100, "the test needs hits"
    assert sums["prompt_tokens_total"] == sum(meta["prompt_tokens"] for meta in metas)
    assert sums["generation_tokens_total"] == sum(meta["completion_tokens"] for meta in metas)
    assert sums["cached_tokens_total"] == sums["prefill_cached_tokens_total"] == sum(meta["cached_tokens"] for meta in metas)
    assert sums["prefill_computed_tokens_total"] == sums["prompt_tokens_total"] - sums["cached_tokens_total"]
    assert sums["queue_time_seconds_count"] == sums["num_requests_total"] == len(answers)
    assert 0 <= sums["queue_time_seconds_sum"] < 60
    for name in ("num_running_reqs", "num_queue_reqs", "gen_throughput", "num_used_tokens", "token_usage", "num_aborted_requests_total"):
        assert sums[name] == 0, name
    assert sums["kv_available_tokens"] + sums["kv_evictable_tokens"] == sums["max_total_num_tokens"]
    assert sorted(lanes) == ["0", "1"]
    for figures in lanes.values():
        parts = [figures[f"cp_lane_{kind}_pages"] for kind in ("free", "cached", "held", "tickets")]
        assert sum(parts) == figures["cp_lane_total_pages"] > 0
        assert figures["cp_lane_cached_pages"] > 0 and figures["cp_lane_held_pages"] == 0
        assert figures["cp_lane_computed_tokens_total"] > 0 and figures["cp_lane_homes"] == 0
    num_rows = sums["prefill_computed_tokens_total"] + sums["generation_tokens_total"] - len(answers)  # the last token of an answer is not fed
    assert num_rows <= sums["cp_lane_computed_tokens_total"] <= num_rows + len(answers)  # a row of the step that was under way then
    assert sums["cp_lane_computed_tokens_total"] <= 2 * sums["cp_busiest_lane_tokens_total"]


def test_load(server):
    (load,) = server.get("/v1/loads", include="all").json()["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0)
    assert load["max_total_num_tokens"] == 512 and 0 < load["cache_hit_rate"] < 1
    assert len(load["memory"]["lanes"]["free"]) == 2
    assert server.get("/get_load").json()[0]["num_reqs"] == 0


def test_every_process_logs_json(server):
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    assert {line["process"] for line in lines} == {"front", "planner", "CP0", "CP1"}
    assert any(line["process"] == "planner" and line["message"].startswith("Prefill batch, #new-seq: 1") for line in lines)
    others = [line for line in server.log().splitlines() if line.strip() and not line.startswith("{")]
    assert not any(line.startswith("[20") for line in others), others
