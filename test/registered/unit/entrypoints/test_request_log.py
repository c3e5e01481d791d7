"""--log-requests by level, and what both log formats make of it."""
import json
import logging

import pytest

from kits.front import Front
from sglane.utils.logging import JsonFormatter, QuietPaths

PROMPT = [504, 3575]


@pytest.fixture(scope="module", params=range(4))
def logged(request, config, tokenizer):
    with Front(config, tokenizer, log_requests=True, log_requests_level=request.param) as running:
        yield running


def lines(caplog):
    return [record for record in caplog.records if record.name == "sglane.observability.request_log"]


def test_levels(logged, caplog):
    level = logged.args.log_requests_level
    with caplog.at_level(logging.INFO):
        logged.ask("/generate", {"input_ids": PROMPT * 120, "rid": "mine", "sampling_params": {"max_new_tokens": 3, "temperature": 0.5}})
        assert logged.http.get("/health_generate").status_code == 200  # a probe is not logged
    received, finished = lines(caplog)
    assert (received.event, received.rid, received.prompt_tokens, received.stream) == ("receive", "mine", 240, False)
    assert (finished.event, finished.rid, finished.finish_reason, finished.completion_tokens) == ("finish", "mine", "length", 3)
    assert 0 < finished.ttft_s <= finished.e2e_s and finished.cached_tokens == 120
    assert vars(received).get("sampling_params", {}).get("temperature") == (0.5 if level >= 1 else None)
    assert vars(received).get("input_ids") == (PROMPT * 120 if level >= 2 else None)
    assert vars(finished).get("text") == ("The capitalThe" if level >= 2 else None)
    assert received.getMessage().startswith("Receive: rid='mine', prompt_tokens=240")


def test_long_texts_are_cut_at_level_2_only(logged, caplog):
    """The prompt is as long as it may be; the limit of the log is beyond it, so it is lowered."""
    with caplog.at_level(logging.INFO), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglane.observability.request_log.CUT", 5)
        logged.ask("/generate", {"input_ids": PROMPT * 10, "sampling_params": {"max_new_tokens": 8}})
    received, finished = lines(caplog)
    expected = {0: None, 1: None, 2: 5, 3: 20}[logged.args.log_requests_level]
    assert (None if expected is None else len(received.input_ids)) == expected
    if logged.args.log_requests_level == 2:
        assert len(finished.text) == len(finished.output_ids) == 5


def test_a_client_that_left(logged, caplog):
    logged.behaviour.step_s = 0.02
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 400}}
    with caplog.at_level(logging.INFO):
        with logged.http.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
        assert logged.wait_idle()
    logged.calm()
    assert lines(caplog)[-1].finish_reason == "left" and lines(caplog)[-1].error == "the client is gone"


def test_json_lines():
    record = logging.makeLogRecord({"name": "a.b", "levelno": logging.INFO, "levelname": "INFO", "msg": "x %d\n%s", "args": (3, "ž"), "created": 0.5,
                                    "msecs": 500.0, "rid": "mine", "fields": {"a": [1]}})
    text = JsonFormatter("planner").format(record)
    assert "\n" not in text
    assert json.loads(text) == {"time": "1970-01-01T00:00:00.500Z", "level": "info", "process": "planner", "logger": "a.b", "message": "x 3\nž",
                                "rid": "mine", "fields": {"a": [1]}}
    try:
        raise ValueError("a reason")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (ValueError, error, error.__traceback__)})
    assert "ValueError: a reason" in json.loads(JsonFormatter("front").format(record))["exception"]


def test_probes_leave_no_access_lines():
    quiet = QuietPaths({"/health", "/metrics"})

    def passes(path):
        args = ("127.0.0.1:1", "GET", path, "1.1", 200)
        return quiet.filter(logging.makeLogRecord({"msg": '%s - "%s %s HTTP/%s" %d', "args": args}))

    assert not passes("/health") and not passes("/metrics?x=1")
    assert passes("/generate") and passes("/healthy") and passes("/health_generate")
    assert quiet.filter(logging.makeLogRecord({"msg": "Started server process [%d]", "args": (3,)}))
