"""Mutated bodies on every POST route of a real server: no 5xx, no hang, nothing left behind, the same answers afterwards."""
import psutil
import pytest

from kits.audit import assert_clean, wait_idle
from kits.canary import Canary
from kits.fuzz import Fuzzer, hostile, report, schema_fields
from kits.server import Server
from kits.text_checkpoint import with_text

FLAGS = (
    "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "1024", "--context-length", "192", "--max-running-requests", "16",
    "--chunked-prefill-size", "64", "--tool-call-parser", "qwen3", "--reasoning-parser", "qwen3", "--log-level", "warning",
)
#: What a process may grow between the first third and the end. A leak of 16 KiB a request is 100 MiB over the longer run.
MAX_GROWTH_BYTES = 48 << 20
ALLOWED = ["tail_copy_skipped"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = with_text("llama", tmp_path_factory.mktemp("model"))
    with Server("--model-path", str(folder), *FLAGS, env={"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}) as running:
        yield running


def resident(server):
    """Bytes by process, but for the grammar worker, which comes and goes."""
    family = [psutil.Process(server.pid), *server.processes("executor"), *server.processes("planner")]
    return {process.pid: process.memory_info().rss for process in family}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("num_requests", "seed"), [(1000, 1), pytest.param(10_000, 2, marks=pytest.mark.slow)])
def test_mutated_bodies(server, num_requests, seed):
    canary = Canary.record(server)
    server.ask("/tokenize", {"prompt": "many words " * 150_000})  # the front's high-water mark: a tokenizer needs 100 times the text
    fuzzer = Fuzzer(server.url, schema_fields(server), seed)
    found = fuzzer.run(0, num_requests // 3)
    assert not found, report(found, server.url)
    before = resident(server)
    found = fuzzer.run(num_requests // 3, num_requests)
    assert not found, report(found, server.url)
    assert sum(fuzzer.statuses.values()) == num_requests
    for status in (200, 400, 404, 405, 415):
        assert fuzzer.statuses[status], f"{status} never came: {fuzzer.statuses}"
    assert fuzzer.statuses[200] > num_requests * 0.1, f"hardly anything was valid: {fuzzer.statuses}"
    assert fuzzer.slowest[0] < 30, f"seconds, request: {fuzzer.slowest}"
    assert_clean(wait_idle(server), allowed_fallbacks=ALLOWED)
    growth = {pid: resident(server).get(pid, 0) - size for pid, size in before.items()}
    assert max(growth.values()) < MAX_GROWTH_BYTES, f"bytes that processes grew: {growth}"
    canary.check(server)
    server.flush_cache()
    assert_clean(wait_idle(server), allowed_fallbacks=ALLOWED)
    assert "Traceback" not in server.log(), server.log_tail()


def test_one_request_is_always_the_same():
    fields = {"/generate": ["text"]}
    assert [hostile(7, index, fields).wire("h") for index in range(50)] == [hostile(7, index, fields).wire("h") for index in range(50)]
    assert hostile(7, 0, fields).wire("h") != hostile(8, 0, fields).wire("h")
