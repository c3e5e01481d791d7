"""A real server for end-to-end tests: its own processes, its own sockets, a log that is shown when something goes wrong.

    with Server("--page-size", "16", env={"SGLANE_POISON": "1"}) as server:
        answer = server.generate("The capital of France is", max_new_tokens=8)
        assert_clean(wait_idle(server))
"""
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

PYTHON_ROOT = Path(__file__).resolve().parents[2] / "python"
NUM_LOG_LINES_SHOWN = 60


class ServerFailed(AssertionError):
    """The server did not start, did not answer, or did not end as it should; the message carries the end of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_sse(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Events of a `text/event-stream` body whose events are one `data:` line and a blank line each.

    Raises AssertionError on any other line, on an event after `[DONE]`, and on an end without it.
    """
    done = False
    expect_blank = False
    for line in lines:
        if expect_blank:
            assert line == "", f"no blank line after an event: {line!r}"
            expect_blank = False
            continue
        assert line.startswith("data: "), f"not a data line: {line!r}"
        assert not done, f"an event after [DONE]: {line!r}"
        expect_blank = True
        payload = line.removeprefix("data: ")
        if payload == "[DONE]":
            done = True
        else:
            yield json.loads(payload)
    assert done, "the stream ended without [DONE]"
    assert not expect_blank, "the last event has no blank line"


class Server:
    """One `python -m sglane.launch_server` on a free port of 127.0.0.1, in a process group of its own.

    `flags` are command-line words; `env` is added to the environment. Entering the context starts the server and waits until
    `/health` is 200; leaving it stops the server and fails if that does not end with exit code 0 or leaves a process behind,
    unless the test ended the server itself (`stop`, `kill`) or is failing already.
    """

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None, start_timeout_s: float = 180.0):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._flags = flags
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []
        self._log_file = tempfile.NamedTemporaryFile(prefix="sglane-", suffix=".log")  # gone when closed
        self.log_path = Path(self._log_file.name)
        self._client = httpx.Client(base_url=self.url, timeout=120.0, trust_env=False)

    # life

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        running = self.poll() is None
        try:
            if running and kind is None:
                code = self.stop()
                if code != 0:
                    raise ServerFailed(f"the server ended with exit code {code} after SIGTERM\n{self.log_tail()}")
            elif kind is not None:
                print(self.log_tail(), file=sys.stderr)
        finally:
            self._clean_up()

    def start(self) -> None:
        """Start the process; returns at once."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self._env}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PYTHON_ROOT), environment.get("PYTHONPATH")]))
        self._process = subprocess.Popen(self._command(), env=environment, stdin=subprocess.DEVNULL, stdout=self._log_file,
                                         stderr=subprocess.STDOUT, start_new_session=True)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "sglane.launch_server", "--host", "127.0.0.1", "--port", str(self.port), *self._flags]

    def wait_ready(self) -> None:
        """Return when `/health` is 200; raise ServerFailed when the process ends or `start_timeout_s` passes."""
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            code = self.poll()
            if code is not None:
                raise ServerFailed(f"the server ended with exit code {code} before it was ready\n{self.log_tail()}")
            self._remember_family()
            if self.health() == 200:
                return
            time.sleep(0.1)
        raise ServerFailed(f"the server was not ready after {self._start_timeout_s:.0f} s\n{self.log_tail()}")

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then wait. Returns the exit code; raises ServerFailed if it does not end or leaves a process behind."""
        self._remember_family()
        self.signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def wait_log(self, text: str, timeout_s: float = 60.0) -> None:
        """Return when the log has `text`; raise ServerFailed when it does not come or the process ends without."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log():
            ended = self.poll() is not None
            if (ended and text not in self.log()) or time.monotonic() > deadline:
                raise ServerFailed(f"{text!r} is not in the log\n{self.log_tail()}")
            self._remember_family()
            time.sleep(0.05)

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        """Wait until the server has ended by itself. Returns its exit code."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server did not end within {timeout_s:.0f} s\n{self.log_tail()}")
            self._remember_family()
            time.sleep(0.05)
        _, left = psutil.wait_procs(self._family, timeout=5.0)
        if left:
            raise ServerFailed(f"the server ended but left {[(p.pid, p.cmdline()) for p in left]}\n{self.log_tail()}")
        return code

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the whole family, without ceremony."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the group has ended
        for child in self._family:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait(10.0)
        psutil.wait_procs(self._family, timeout=10.0)

    def poll(self) -> int | None:
        """Exit code, or None while the launcher runs."""
        assert self._process is not None, "not started"
        return self._process.poll()

    def started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def processes(self, word: str = "") -> list[psutil.Process]:
        """The launcher's living descendants whose command line contains `word`, for example `sglane::executor`."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
            return [child for child in children if word in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:
            return []

    def _remember_family(self) -> None:
        """Children are only found while their parent lives; orphans are looked for after it has ended."""
        self._family = list({*self._family, *self.processes()})

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """The end of the server's log, framed."""
        lines = self.log().splitlines()[-NUM_LOG_LINES_SHOWN:]
        return "\n".join(["---- server log, last lines ----", *lines, "---- end of server log ----"])

    def _clean_up(self) -> None:
        self.kill()
        self._client.close()
        self._log_file.close()

    # requests

    def health(self) -> int:
        """Status of GET /health; 0 when nobody answers."""
        try:
            return self._client.get("/health", timeout=30.0).status_code
        except httpx.TransportError:
            return 0

    def get(self, path: str, **params: Any) -> httpx.Response:
        return self._client.get(path, params=params)

    def post(self, path: str, body: Any = None, **params: Any) -> httpx.Response:
        """POST JSON; returns the response whatever its status."""
        return self._client.post(path, json=body, params=params)

    def send(self, method: str, path: str, content: bytes = b"", content_type: str = "application/json") -> httpx.Response:
        """Any bytes; returns the response whatever its status."""
        return self._client.request(method, path, content=content, headers={"content-type": content_type} if content_type else {})

    def ask(self, path: str, body: Any) -> Any:
        """POST JSON and return the JSON answer; raises ServerFailed on any status but 200."""
        response = self.post(path, body)
        if response.status_code != 200:
            raise ServerFailed(f"POST {path}: {response.status_code} {response.text}\n{self.log_tail()}")
        return response.json()

    def generate(self, prompt: str | Sequence[int], *, extra: Mapping[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
        """POST /generate with text or token ids; greedy unless `temperature` is given. `extra` are fields beside sampling_params."""
        answer: dict[str, Any] = self.ask("/generate", generate_body(prompt, extra, sampling))
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """POST with `stream: true`; yields the events before `[DONE]`. Closing the iterator early disconnects."""
        with self._client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise ServerFailed(f"POST {path}: {response.status_code} {response.read().decode()}\n{self.log_tail()}")
            assert response.headers["content-type"].startswith("text/event-stream"), response.headers["content-type"]
            yield from parse_sse(response.iter_lines())

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """One user message to /v1/chat/completions; greedy unless `temperature` is given."""
        body = {"model": "default", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        answer: dict[str, Any] = self.ask("/v1/chat/completions", body)
        return answer

    def server_info(self) -> dict[str, Any]:
        response = self.get("/server_info")
        assert response.status_code == 200, f"GET /server_info: {response.status_code} {response.text}"
        info: dict[str, Any] = response.json()
        return info

    def kv_ledger(self) -> dict[str, Any]:
        """The planner's account of pages, slots, leases and requests, as `/server_info` shows it."""
        ledger: dict[str, Any] = self.server_info()["internal_states"][0]["kv_ledger"]
        return ledger

    def flush_cache(self, timeout_s: float = 30.0) -> None:
        response = self.post("/flush_cache", timeout=timeout_s)
        assert response.status_code == 200, f"/flush_cache: {response.status_code} {response.text}"


def generate_body(prompt: str | Sequence[int], extra: Mapping[str, Any] | None, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Body of a native request: `text` or `input_ids`, greedy sampling unless told otherwise."""
    key, value = ("text", prompt) if isinstance(prompt, str) else ("input_ids", [int(token) for token in prompt])
    return {key: value, "sampling_params": {"temperature": 0, **sampling}, **(extra or {})}
