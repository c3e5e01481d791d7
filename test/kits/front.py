"""The front without an engine: HTTP server and engine client in a thread, a FakePlanner behind them, real sockets between all.

    with Front(tokenizer) as front:
        answer = front.post("/generate", {"input_ids": [1, 2, 3]})
"""
import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

import httpx
import uvicorn
import zmq

from kits.fake_planner import Behaviour, FakePlanner
from kits.server import parse_sse
from sglane.configs.model_config import ModelConfig
from sglane.entrypoints.engine_client import EngineClient
from sglane.entrypoints.http_server import make_app
from sglane.entrypoints.parsers.markers import markers_of
from sglane.entrypoints.processes import WorkFolder, bind_http
from sglane.entrypoints.server_state import Engine, ServerState
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.server_args import ServerArgs


class QuietServer(uvicorn.Server):
    """Runs beside the test's own signal handlers."""

    def install_signal_handlers(self) -> None:
        pass


class Front:
    """One front on a free port of 127.0.0.1."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer | None, **flags: Any):
        self.args = ServerArgs(skip_tokenizer_init=tokenizer is None, **flags)
        self._config = config
        self._tokenizer = tokenizer
        self._folder = WorkFolder()
        endpoints = self._folder.endpoints(1)
        self.behaviour = Behaviour()
        self.planner = FakePlanner(endpoints, self.behaviour)
        self._listener = bind_http("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._endpoints = endpoints
        self._started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, QuietServer]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=30.0, trust_env=False)

    async def _serve(self) -> None:
        context = zmq.Context()
        self.state = ServerState(self.args, self._config, "a test")
        client = EngineClient(context, self._endpoints, self.state.tracker)
        vocabulary = self._endpoints.vocabulary if self.args.offers_grammars() else ""
        markers = markers_of(self.args.tool_call_parser, self.args.reasoning_parser)
        backend = self.args.grammar_backend
        self.state.engine_ready(Engine.assemble(client, self._tokenizer, self._config, await client.ready, vocabulary, backend, markers))
        self.state.warmed_up()
        server = QuietServer(uvicorn.Config(make_app(self.state), log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=2))
        self._started.set_result((asyncio.get_running_loop(), server))
        await server.serve(sockets=[self._listener])
        await self.state.end_helpers()
        client.close()
        context.term()

    def __enter__(self) -> Self:
        self.planner.start()
        self._thread.start()
        self._loop, self._server = self._started.result(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(10.0)
        self.planner.stop()
        self._folder.remove()

    def on_loop(self, call: Any) -> Any:
        """Run `call()` on the event loop's thread and return its result."""

        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10.0)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options) if body is not None else self.http.post(path, **options)

    def ask(self, path: str, body: Any) -> Any:
        """POST; the JSON of a 200."""
        response = self.post(path, body)
        assert response.status_code == 200, f"POST {path}: {response.status_code} {response.text}"
        return response.json()

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """POST with stream: true; all events."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream"), response.headers
            return list(parse_sse(response.iter_lines()))

    def calm(self) -> None:
        """Back to a planner at full speed that remembers nothing."""
        assert self.wait_idle(), "an earlier test left requests behind"
        self.planner.go_on()
        self.behaviour.calm()

    def wait_received(self, kind: type, count: int) -> list[Any]:
        """At least `count` messages of a kind, in the order in which the planner got them."""
        deadline = time.monotonic() + 5.0
        while len(self.behaviour.received_of(kind)) < count:
            assert time.monotonic() < deadline, f"{self.behaviour.received_of(kind)}: not {count} of {kind.__name__}"
            time.sleep(0.005)
        return self.behaviour.received_of(kind)

    def wait_idle(self, timeout_s: float = 5.0) -> bool:
        """True when neither front nor planner has a request under way."""
        deadline = time.monotonic() + timeout_s
        client = self.state.engine().client
        while client.num_jobs or self.planner.num_running:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True
