"""Shared by the serving benchmarks: a server of our own, streamed requests with little client cost, medians."""
import asyncio
import contextlib
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import torch

PYTHON_ROOT = Path(__file__).resolve().parents[1] / "python"
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
START_TIMEOUT_S = 300.0


@dataclass
class Stream:
    """Arrival of one answer: (seconds since the request was sent, tokens so far) of every event."""

    events: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.events[0][0]


async def stream(url: str, payload: bytes, start: asyncio.Barrier) -> Stream:
    """POST a JSON body and read server-sent events. start: passed when all connections are there; then the clock runs. Raises RuntimeError on any
    status but 200."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 24)
    await start.wait()
    started_s = time.perf_counter()
    writer.write(f"POST {parts.path} HTTP/1.1\r\nHost: {parts.hostname}\r\nContent-Type: application/json\r\n"
                 f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{url}: {status.decode().strip()} {(await reader.read()).decode(errors='replace')[:500]}")
    found = Stream()
    async for line in reader:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            counted = COMPLETION_TOKENS.search(line)
            found.events.append((time.perf_counter() - started_s, int(counted[1]) if counted else len(found.events) + 1))
    writer.close()
    return found


def run_streams(url: str, bodies: list[dict[str, object]]) -> list[Stream]:
    """All requests at once."""
    payloads = [json.dumps(body).encode() for body in bodies]

    async def every() -> list[Stream]:
        start = asyncio.Barrier(len(bodies))
        return list(await asyncio.gather(*(stream(url, payload, start) for payload in payloads)))

    return asyncio.run(every())


def decode_rate(streams: list[Stream]) -> float:
    """Tokens per second of all streams together, in the window in which all of them run."""
    begin, end = max(s.events[0][0] for s in streams), min(s.events[-1][0] for s in streams)
    tokens = 0
    for s in streams:
        inside = [count for at, count in s.events if begin <= at <= end]
        tokens += inside[-1] - inside[0]
    return tokens / (end - begin)


@contextlib.contextmanager
def own_server(*flags: str, variables: dict[str, str] | None = None) -> Iterator[tuple[str, float]]:
    """`python -m sglane.launch_server` with the flags and environment variables: its URL, and the seconds from start to ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(PYTHON_ROOT), os.environ.get("PYTHONPATH")])), **(variables or {})}
    url = f"http://127.0.0.1:{port}"
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", "sglane.launch_server", "--port", str(port), *flags], env=environment, stdout=log,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while not _healthy(url):
                if process.poll() is not None or time.perf_counter() - begin > START_TIMEOUT_S:
                    log.seek(0)
                    raise RuntimeError(f"the server did not start:\n{log.read().decode(errors='replace')[-4000:]}")
                time.sleep(0.05)
            yield url, time.perf_counter() - begin
        finally:
            process.terminate()
            process.wait(60)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def spread(values: list[float], digits: int = 1) -> str:
    """median [min .. max]"""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def machine() -> str:
    """One line for the record."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    load = os.getloadavg()[0]
    return (f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} CPUs, load {load:.1f}, "
            f"Python {platform.python_version()}, torch {torch.__version__}")
