"""Faults of processes: clients get errors within seconds, nothing hangs, nothing is orphaned, the exit code says so."""
import signal
import threading
import time

import httpx
import pytest

from kits.audit import assert_clean, wait_idle
from kits.checkpoints import tiny
from kits.server import Server

SECONDS = 15.0


@pytest.mark.parametrize("victim", ["sglane::executor", "sglane::planner"])
def test_sigkill_of_a_child_mid_request(victim):
    with Server("--dtype", "float32") as server:
        results = []

        def ask():
            try:
                response = httpx.post(
                    server.url + "/generate", json={"text": "Once", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}, timeout=60
                )
                results.append((response.status_code, response.text))
            except httpx.HTTPError as error:
                results.append((0, repr(error)))

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        time.sleep(1.5)
        assert not results, f"answered before the fault: {results}"
        start = time.monotonic()
        server.processes(victim)[0].send_signal(signal.SIGKILL)
        for client in clients:
            client.join(SECONDS)
            assert not client.is_alive(), f"a client still hangs after {SECONDS} s\n{server.log_tail()}"
        assert time.monotonic() - start < SECONDS
        assert all(status >= 500 or status == 0 for status, _ in results), results
        assert any(status >= 500 for status, _ in results), f"nobody got a clear error: {results}"
        assert server.wait_exit(SECONDS) != 0
        assert server.health() == 0


def test_a_rank_that_hangs_is_found_by_the_watchdog():
    """SIGSTOP: the process lives, but its steps make no progress."""
    with Server("--model-path", str(tiny("llama")), "--skip-tokenizer-init", "--watchdog-timeout-s", "3") as server:
        results = []

        def ask():
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
            results.append(httpx.post(server.url + "/generate", json=body, timeout=60))

        client = threading.Thread(target=ask)
        client.start()
        time.sleep(0.3)
        server.processes("sglane::executor")[0].send_signal(signal.SIGSTOP)
        client.join(3 + SECONDS)
        assert not client.is_alive(), f"the client hangs\n{server.log_tail()}"
        assert results[0].status_code == 503 and "progress" in results[0].text, results[0].text
        assert server.wait_exit(SECONDS) != 0


def test_a_bad_model_path_ends_with_its_name():
    server = Server("--model-path", "/no/such/folder")
    server.start()
    try:
        assert server.wait_exit(60) != 0
        assert "/no/such/folder" in server.log()
    finally:
        server.kill()


def test_a_busy_port_is_refused_at_once():
    with Server("--dtype", "float32") as first:
        second = Server()
        second.port = first.port
        second.start()
        try:
            assert second.wait_exit(20) != 0
            assert str(first.port) in second.log()
        finally:
            second.kill()
        assert_clean(wait_idle(first))


def test_sigterm_lets_a_running_stream_finish():
    with Server("--dtype", "float32") as server:
        body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0}}
        events = server.stream("/generate", body)
        first = next(events)
        server.signal(signal.SIGTERM)
        rest = list(events)
        assert rest[-1]["meta_info"]["completion_tokens"] == 60 and first["meta_info"]["completion_tokens"] < 60
        assert rest[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert server.wait_exit(30) == 0
