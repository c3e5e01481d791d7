"""Full queues and large bodies: the same answer on every route that takes work, streaming or not, and every one of them is counted."""
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kits.fake_planner import QUEUE_FULL
from kits.front import Front

LIMIT = 4096
#: Routes that generate, with a prompt that the planner has no place for.
FULL = {
    "/generate": {"input_ids": [QUEUE_FULL]}, "/v1/completions": {"prompt": [QUEUE_FULL]}, "/v1/chat/completions": {"input_ids": [QUEUE_FULL]},
}
POSTS = [*FULL, "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/abort_request"]


@pytest.fixture(scope="module")
def front(config, tokenizer):
    with Front(config, tokenizer, enable_metrics=True, max_body_bytes=LIMIT) as running:
        yield running


def responses(front, route, status):
    families = text_string_to_metric_families(front.http.get("/metrics").text)
    labels = {"endpoint": route, "method": "POST", "status_code": str(status)}
    return sum(sample.value for family in families for sample in family.samples
               if sample.name == "sglang:http_responses_total" and labels.items() <= sample.labels.items())


def aborted(front, streams):
    families = text_string_to_metric_families(front.http.get("/metrics").text)
    return sum(sample.value for family in families for sample in family.samples
               if sample.name == "sglang:num_aborted_requests_total" and sample.labels["is_streaming"] == str(streams).lower())


@pytest.mark.parametrize("route", FULL)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_full_queue(front, route, stream, num_choices):
    body = {**FULL[route], "stream": stream}
    body |= {"sampling_params": {"n": num_choices}} if route == "/generate" else {"n": num_choices}
    before = responses(front, route, 503), aborted(front, stream)
    response = front.post(route, body)
    assert response.status_code == 503 and response.headers["retry-after"] == "1" and response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] == "service_unavailable_error" and "queue is full" in response.json()["message"]
    assert front.wait_idle()
    assert (responses(front, route, 503), aborted(front, stream)) == (before[0] + 1, before[1] + num_choices)


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body(front, route, chunked):
    before = responses(front, route, 413)
    data = b'{"stream": true, "text": "' + b"x" * LIMIT + b'"}'
    response = front.http.post(route, content=iter([data[:2000], data[2000:]]) if chunked else data, headers={"content-type": "application/json"})
    assert response.status_code == 413 and str(LIMIT) in response.json()["message"], response.text
    assert responses(front, route, 413) == before + 1
    assert front.wait_idle() and front.http.get("/health").status_code == 200


def test_a_body_of_exactly_the_limit(front):
    start, end = b'{"prompt": "', b'"}'
    data = start + b"x" * (LIMIT - len(start) - len(end)) + end
    assert front.http.post("/tokenize", content=data, headers={"content-type": "application/json"}).status_code == 200


def test_nothing_is_left_active(front):
    families = text_string_to_metric_families(front.http.get("/metrics").text)
    active = {sample.labels["endpoint"]: sample.value for family in families for sample in family.samples
              if sample.name == "sglang:http_requests_active" and sample.labels["method"] == "POST"}
    assert active and not any(active.values()), active
