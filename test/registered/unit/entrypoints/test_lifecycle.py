"""Requests that end early: disconnects, aborts, names in use; health, flush, draining."""
import threading
import time

import httpx
import pytest

from kits.fake_planner import STATE
from kits.front import Front
from kits.sse import collect_native
from sglane.plan.io_struct import AbortRequest, FlushCache, GenerateRequest

LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize(("path", "body"), [
    ("/generate", {"input_ids": [504] * 3, "sampling_params": LONG}),
    ("/generate", {"input_ids": [504] * 3, "sampling_params": {**LONG, "n": 3}}),
    ("/generate", {"input_ids": [[504], [505]], "sampling_params": LONG}),
    ("/v1/completions", {"prompt": [[504], [505]], "max_tokens": 400, "ignore_eos": True, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True, "n": 3}),
])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_every_generation(front, path, body, stream):
    front.behaviour.step_s = 0.05
    if stream:
        with front.http.stream("POST", path, json={**body, "stream": True}) as response:
            for _, _line in zip(range(4), response.iter_lines()):
                pass
    else:
        with pytest.raises(httpx.ReadTimeout):
            front.post(path, body, timeout=0.3)
    assert front.wait_idle(), "the planner still runs what nobody waits for"
    requests = front.behaviour.received_of(GenerateRequest)
    aborts = front.behaviour.received_of(AbortRequest)
    assert {abort.rid for abort in aborts} == {request.rid for request in requests}
    assert len(aborts) == len(requests), "one abort each"


def test_nothing_is_aborted_after_a_normal_end(front):
    front.stream("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 3}})
    front.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 3}})
    time.sleep(0.05)
    assert not front.behaviour.received_of(AbortRequest)


class Background:
    """One request in a thread."""

    def __init__(self, front, path, body):
        self.answer = None

        def work():
            self.answer = httpx.post(front.url + path, json=body, timeout=30, trust_env=False)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def result(self):
        self._thread.join(10.0)
        assert self.answer is not None, "no answer"
        return self.answer


def test_abort_by_rid(front):
    front.behaviour.step_s = 0.01
    request = Background(front, "/generate", {"input_ids": [504], "rid": "jméno", "sampling_params": LONG})
    front.wait_received(GenerateRequest, 1)
    assert front.post("/abort_request", {"rid": "somebody else"}).status_code == 200
    response = front.post("/abort_request", {"rid": "jméno"})
    assert (response.status_code, response.content) == (200, b"")
    answer = request.result()
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 <= answer.json()["meta_info"]["completion_tokens"] < 400


def test_abort_all_ends_streams_with_one_finish_each(front):
    front.behaviour.step_s = 0.01
    bodies = [{"input_ids": [504], "sampling_params": {**LONG, "n": 2}}, {"input_ids": [505], "sampling_params": LONG}]
    events = []
    threads = [threading.Thread(target=lambda body=body: events.append(front.stream("/generate", body))) for body in bodies]
    for thread in threads:
        thread.start()
    front.wait_received(GenerateRequest, 3)
    front.post("/abort_request", {"abort_all": True})
    for thread in threads:
        thread.join(10.0)
    for stream in events:
        ends = collect_native(stream, 2 if stream[0].get("index") is not None else 1)
        assert all(end["meta_info"]["finish_reason"]["type"] == "abort" for end in ends)


def test_a_rid_in_use_is_a_400_and_harms_nobody(front):
    front.planner.hold()
    first = Background(front, "/generate", {"input_ids": [504], "rid": "twice", "sampling_params": {"max_new_tokens": 2}})
    front.wait_received(GenerateRequest, 1)
    for path, body in [("/generate", {"input_ids": [505], "rid": "twice"}), ("/v1/completions", {"prompt": [505], "rid": "twice"})]:
        response = front.post(path, body)
        assert response.status_code == 400 and response.json()["param"] == "rid" and "twice" in response.json()["message"]
    front.planner.go_on()
    assert first.result().json()["output_ids"] == [504, 504]
    for _ in range(20):  # back to back
        assert front.ask("/generate", {"input_ids": [504], "rid": "twice", "sampling_params": {"max_new_tokens": 1}})["output_ids"] == [504]


def test_a_refused_request_leaves_its_name_free(front):
    body = {"input_ids": [504] * 600, "rid": "name"}
    assert [front.post("/generate", body).status_code for _ in range(2)] == [400, 400]
    assert "too long" in front.post("/generate", body).json()["message"]
    front.ask("/generate", {"input_ids": [504], "rid": "name", "sampling_params": {"max_new_tokens": 1}})


def test_late_tokens_of_an_ended_request_do_not_reach_its_successor(front, tokenizer):
    """A stop string ends the first one while the planner still sends; the second has the same name."""
    x = tokenizer.encode("X", add_special_tokens=False).tolist()
    for _ in range(30):
        front.ask("/generate", {"input_ids": x, "rid": "same", "sampling_params": {"max_new_tokens": 50, "stop": "X", "ignore_eos": True}})
        answer = front.ask("/generate", {"input_ids": [504], "rid": "same", "sampling_params": {"max_new_tokens": 2}})
        assert answer["output_ids"] == [504, 504]


def test_flush(front):
    response = front.post("/flush_cache?timeout=3")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    assert front.wait_received(FlushCache, 1)[0].timeout_s == 3.0
    assert front.http.get("/flush_cache").status_code == 200
    front.behaviour.is_busy = True
    busy = front.post("/flush_cache")
    assert busy.status_code == 400 and "1 requests run" in busy.json()["message"]


def test_information(front, config):
    info = front.http.get("/model_info").json()
    assert info["model_path"] == config.source.path and info["is_generation"] is True
    assert front.http.get("/get_model_info").json() == info
    server = front.http.get("/server_info").json()
    assert server["internal_states"][0]["kv_ledger"] == STATE["kv_ledger"]
    assert server["max_total_num_tokens"] == 4096 and server["page_size"] == 64 and server["version"]
    assert server["internal_states"][0]["page_size"] == 64 and server["launch_command"] == "a test"
    assert front.http.get("/openapi.json").status_code == 200


def test_health_when_busy_and_when_silent(config):
    with Front(config, None, health_timeout_s=1.0) as front:
        for path in ("/health", "/v1/health", "/ready", "/ping", "/health_generate"):
            assert front.http.get(path).status_code == 200, path
        front.planner.hold()  # busy with something long: the loop turns, no output comes
        time.sleep(1.5)
        assert front.http.get("/health").status_code == 200
        assert front.http.get("/health_generate").status_code == 503
        front.behaviour.is_silent = True
        time.sleep(1.5)
        response = front.http.get("/health")
        assert response.status_code == 503 and "no sign of life" in response.json()["message"]
        assert front.http.get("/ping").status_code == 200


def test_draining_refuses_new_requests_and_finishes_old_ones(config):
    with Front(config, None) as front:
        front.behaviour.step_s = 0.02
        request = Background(front, "/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}})
        front.wait_received(GenerateRequest, 1)
        front.on_loop(front.state.drain)
        for path, body in [("/generate", {"input_ids": [504]}), ("/v1/completions", {"prompt": [504]}), ("/v1/chat/completions", {"messages": []})]:
            response = front.post(path, body)
            assert response.status_code == 503 and "shutting down" in response.json()["message"] and "retry-after" in response.headers
        assert front.http.get("/health").status_code == 503
        assert front.http.get("/server_info").status_code == 200
        assert len(request.result().json()["output_ids"]) == 20


def test_an_illegal_phase_change_raises(config):
    with Front(config, None) as front, pytest.raises(AssertionError, match="warmed_up"):
        front.on_loop(front.state.warmed_up)
