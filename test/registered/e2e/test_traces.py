"""Spans of a real server at a real OTLP receiver: the client's trace goes on, figures agree with the answers, a dead collector harms nobody."""
import subprocess
import sys
import threading
import time

import httpx
import pytest

from kits.audit import wait_idle
from kits.checkpoints import tiny
from kits.front_server import FrontServer
from kits.otlp import ERROR, SERVER, BlackHole, Collector
from kits.server import PYTHON_ROOT, Server, free_port

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=a"}
FLAGS = ("--model-path", str(tiny("llama")), "--skip-tokenizer-init", "--dtype", "float32", "--page-size", "8", "--max-total-tokens", "8192",
         "--skip-server-warmup", "--max-running-requests", "1", "--max-queued-requests", "2")
PROMPT = [(7 * index) % 400 + 3 for index in range(40)]


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def world(request):
    """(server, collector); gRPC is what the server uses unless it is told otherwise."""
    env = {"OTEL_BSP_SCHEDULE_DELAY": "100"} | ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": request.param} if request.param != "grpc" else {})
    env |= {"SGLANE_HOLD": '{"rank": 0, "point": "forward", "sleep_ms": 10}', "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    with Collector(request.param) as collector, Server(*FLAGS, "--enable-trace", "--otlp-traces-endpoint", collector.address, env=env) as server:
        yield server, collector


def ask(server, body, headers=HEADERS, path="/generate"):
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60.0, trust_env=False)


def until(condition):
    """Wait for a true value and return it."""
    deadline_s = time.monotonic() + 20.0
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.02)
    return value


def spans_with(collector, rid, count=1):
    def found():
        return [span for span in collector.named("llm_request") if span.attributes.get("gen_ai.request.id") == rid]

    until(lambda: len(found()) >= count)
    return found()


def test_a_request(world):
    server, collector = world
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}}
    ask(server, {**body, "rid": "cold"})
    before_ns = time.time_ns()
    meta = ask(server, {**body, "rid": "warm"}).json()["meta_info"]
    after_ns = time.time_ns()
    (span,) = spans_with(collector, "warm")
    assert (span.trace_id, span.parent_id, span.kind, span.status) == (TRACE_ID, PARENT_ID, SERVER, 0)
    assert before_ns - 1e6 <= span.start_ns < span.end_ns <= after_ns + 1e6
    assert span.resource["service.name"] == "sglane" and span.resource["deployment.environment.name"] == "test"
    found = {name.removeprefix("gen_ai."): value for name, value in span.attributes.items()}
    assert found["usage.prompt_tokens"] == meta["prompt_tokens"] == 40
    assert found["usage.completion_tokens"] == meta["completion_tokens"] == 12
    assert found["usage.cached_tokens"] == meta["cached_tokens"] > 0
    assert (found["request.temperature"], found["request.top_p"], found["request.max_tokens"]) == (0.5, 0.9, 12)
    assert found["request.model"] == "llama" and found["response.finish_reasons"] == ["length"]
    assert 0 <= found["latency.time_in_queue"] < found["latency.time_to_first_token"] < found["latency.e2e"]
    assert abs(found["latency.e2e"] - (span.end_ns - span.start_ns) / 1e9) < 1e-3
    children = collector.children(span)
    assert list(children) == ["tokenize", "queue", "prefill", "decode"]
    assert children["tokenize"].start_ns == span.start_ns and children["decode"].end_ns == span.end_ns
    for earlier, later in zip(list(children.values()), list(children.values())[1:]):
        assert earlier.trace_id == TRACE_ID and earlier.start_ns <= earlier.end_ns == later.start_ns


def test_without_headers_a_new_trace_begins(world):
    server, collector = world
    for rid in ("one", "two"):
        assert ask(server, {"input_ids": PROMPT, "rid": rid}, headers={}).status_code == 200
    (one,), (two,) = spans_with(collector, "one"), spans_with(collector, "two")
    assert one.parent_id == two.parent_id == "" and len({one.trace_id, two.trace_id, TRACE_ID}) == 3


def test_each_choice_has_a_span(world):
    server, collector = world
    ask(server, {"input_ids": PROMPT, "rid": "many", "sampling_params": {"n": 3, "max_new_tokens": 2}})
    spans = spans_with(collector, "many", 3)
    assert len({span.id for span in spans}) == 3 and {span.parent_id for span in spans} == {PARENT_ID}


def test_a_request_that_is_not_sampled_leaves_no_span(world):
    server, collector = world
    ask(server, {"input_ids": PROMPT, "rid": "unsampled"}, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    ask(server, {"input_ids": PROMPT, "rid": "sampled"})
    spans_with(collector, "sampled")
    assert not [span for span in collector.named("llm_request") if span.attributes.get("gen_ai.request.id") == "unsampled"]


@pytest.mark.parametrize(("body", "path", "status", "word"), [
    ({"input_ids": [-4]}, "/generate", 400, "input_ids"), ({"messages": []}, "/v1/chat/completions", 400, "tokenizer"),
])
def test_refused_before_it_began(world, body, path, status, word):
    server, collector = world
    parent_id = f"{len(path):016x}"
    answer = ask(server, body, {"traceparent": f"00-{TRACE_ID}-{parent_id}-01"}, path)
    assert answer.status_code == status
    (span,) = until(lambda: [span for span in collector.named("llm_request") if span.parent_id == parent_id])
    assert span.status == ERROR and word in span.message and span.message == answer.json()["message"]
    assert span.attributes["http.response.status_code"] == status and span.attributes["url.path"] == path


def test_aborts_and_a_full_queue(world):
    server, collector = world
    long = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "stream": True}
    with httpx.Client(base_url=server.url, timeout=60.0, trust_env=False) as client:
        with client.stream("POST", "/generate", json={**long, "rid": "left"}, headers=HEADERS) as first:
            lines = first.iter_lines()  # to be kept: without it the connection would be closed
            next(lines)
            second = threading.Thread(target=ask, args=(server, {**long, "rid": "aborted"}))
            second.start()
            until(lambda: server.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"])
            server.post("/abort_request", {"rid": "aborted"})
            second.join(30.0)
            del lines
    (left,), (aborted,) = spans_with(collector, "left"), spans_with(collector, "aborted")
    assert (left.status, aborted.status) == (ERROR, ERROR) and "gone" in left.message and "abort" in aborted.message
    assert "decode" in collector.children(left) and list(collector.children(aborted)) == ["tokenize", "queue"]
    assert aborted.attributes["gen_ai.response.finish_reasons"] == ["abort"] and aborted.attributes["gen_ai.usage.completion_tokens"] == 0
    wait_idle(server)
    answer = ask(server, {"input_ids": [PROMPT] * 4, "rid": "batch", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}})
    assert answer.status_code == 503
    spans = [spans_with(collector, f"batch_{index}")[0] for index in range(4)]
    full = [span for span in spans if span.attributes.get("http.response.status_code") == 503]
    assert full and all(span.status == ERROR and "queue is full" in span.message for span in full)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("kind", ["gone", "silent"])
def test_a_dead_collector_harms_nobody(protocol, kind):
    env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol, "OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_BSP_MAX_QUEUE_SIZE": "16",
           "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8", "FRONT_SERVER_STEP": "0.001"}
    with BlackHole() as hole:
        address = hole.address if kind == "silent" else f"127.0.0.1:{free_port()}"
        with FrontServer(*FLAGS[:3], "--skip-server-warmup", "--enable-trace", "--otlp-traces-endpoint", address, env=env) as server:
            slowest_s = 0.0
            for _ in range(30):  # more spans than the queue and a batch under way hold
                begin_s = time.monotonic()
                assert ask(server, {"input_ids": [504, 505], "sampling_params": {"max_new_tokens": 3}}).status_code == 200
                slowest_s = max(slowest_s, time.monotonic() - begin_s)
            assert slowest_s < 5.0 and server.health() == 200
            end_s = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - end_s < 20.0
            assert "dropping" in server.log(), server.log_tail()


CHECK = """
import sys
from sglane.entrypoints.server_state import ServerState
from sglane.configs.model_config import load_model_config
from sglane.server_args import ServerArgs, ConfigError
args, missing = ServerArgs(enable_trace={on}), {missing!r}
if missing:
    sys.modules[missing] = None  # importing it is an ImportError, as if it was not installed
try:
    ServerState(args, load_model_config(None, None), "a test")
except ConfigError as error:
    print("refused:", error)
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.") and name.split(".")[1] in ("sdk", "exporter")))
"""


def run_check(on, missing="", **env):
    ran = subprocess.run([sys.executable, "-c", CHECK.format(on=on, missing=missing)], capture_output=True, text=True,
                         env={"PYTHONPATH": str(PYTHON_ROOT), "PATH": "/usr/bin:/bin", **env})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_nothing_is_loaded_without_the_flag():
    assert run_check(False) == "[]\n"
    assert "opentelemetry.sdk.trace" in run_check(True)


@pytest.mark.parametrize(("missing", "protocol"), [
    ("opentelemetry.sdk", "grpc"), ("opentelemetry.exporter.otlp.proto.grpc", "grpc"), ("opentelemetry.exporter.otlp.proto.http", "http/protobuf"),
])
def test_a_missing_package_names_the_extra(missing, protocol):
    assert "sglane[trace]" in run_check(True, missing, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=protocol)


def test_an_unknown_protocol_ends_the_start():
    server = FrontServer("--enable-trace", env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})
    server.start()
    assert server.wait_exit(60.0) == 1 and "must be grpc or http/protobuf" in server.log()
