"""`sglang-router` in front of two servers."""
import time
from pathlib import Path

import httpx

from clients.bench import SHORT_CONTEXT, Bench, check, tail
from clients.client import Client
from clients.environments import Packages
from clients.runs.counted import count_of
from kits.server import free_port

READY_TIMEOUT_S = 60.0


def run(bench: Bench) -> str:
    port, workers = free_port(), (bench.url, bench.another_url(SHORT_CONTEXT))
    url = f"http://127.0.0.1:{port}"
    command = (
        bench.environment.python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1",
        "--prometheus-port", free_port(), "--worker-urls", *workers, "--policy", "round_robin", "--worker-startup-check-interval", 1,
    )
    with bench.background(*command) as log:
        wait_ready(url, log)
        before = [requests_served(worker) for worker in workers]
        num_checks = count_of(bench.python("router_calls.py", url, bench.model))
        served = [requests_served(worker) - start for worker, start in zip(workers, before)]
    check(min(served) >= 3, f"requests went to one worker: {served}")
    return f"two workers, {num_checks} checks by the openai client and by hand, {served[0]} + {served[1]} requests, flush, loads"


def wait_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/readiness", timeout=5.0, trust_env=False)
            if answer.status_code == 200 and answer.json().get("healthy_workers") == 2:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.3)
    check(False, f"the router did not take both workers\n{tail(log)}")


def requests_served(url: str) -> int:
    """Requests that a worker has been given, by its own count."""
    state = httpx.get(f"{url}/server_info", timeout=30.0, trust_env=False).json()["internal_states"][0]
    return int(state["totals"]["num_requests"])


SGLANG_ROUTER = Client("sglang-router", "0.3.2", "regular mode, round robin over two servers: openai client, /generate, flush, loads",
                       Packages(("sglang-router==0.3.2", "openai==3.57.0")), run, is_fast=True)
