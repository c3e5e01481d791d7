"""What stands in front of the routes: keys, the size limit of bodies, the count of HTTP requests. Plain ASGI, so that streams pass untouched."""
import hmac
from collections.abc import Iterable
from typing import TYPE_CHECKING

import orjson
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglane.entrypoints.errors import ApiError, error_response
from sglane.entrypoints.page_api import FILES
from sglane.observability.metrics import Metrics
from sglane.observability.requests import Caller

if TYPE_CHECKING:  # loaded with --enable-trace only
    from sglane.observability.tracing import Tracing

#: Open to everybody: probes and scrapers have no key, and the page asks for one.
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ready", "/ping", "/metrics", *FILES})
#: No line in the access log: asked for again and again by machines, and by the page.
QUIET_PATHS = OPEN_PATHS | {"/v1/loads", "/get_load"}
#: Verbs of an operator; with --admin-api-key they need that key.
ADMIN_PATHS = frozenset({
    "/flush_cache", "/abort_request", "/pause_generation", "/continue_generation", "/start_profile", "/stop_profile", "/configure_logging",
})
#: Routes whose last part is a name.
MODEL_PREFIX = "/v1/models/"
#: Work for the model: what traces are made of.
TRACED_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
#: Where an ASGI scope keeps its `Caller`.
CALLER = "sglane.caller"


class KeyCheck:
    """401 in the usual shape unless the request has the key that its route needs. An admin key opens everything."""

    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None):
        self._app = app
        self._api_keys = [key for key in (api_key, admin_api_key) if key] if api_key else []
        self._admin_keys = [admin_api_key] if admin_api_key else self._api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            await error_response(ApiError(401, "the request needs a valid key: Authorization: Bearer KEY"))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"]
        keys = self._admin_keys if path in ADMIN_PATHS else self._api_keys
        if not keys or path in OPEN_PATHS:
            return True
        given = bearer_of(scope["headers"])
        return given is not None and any(hmac.compare_digest(given, key.encode()) for key in keys)


def bearer_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key of an Authorization header."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


class BodyLimit:
    """A request body that grows beyond the limit is a 413; the rest of it is not read."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body") or b"")
            if num_bytes > self._max_bytes:
                raise ApiError(413, f"the body is larger than {self._max_bytes} bytes")
            return message

        await self._app(scope, counting_receive, send)


class HttpCount:
    """Counts requests by route. Paths that are no route are one endpoint, so that nobody can make up names."""

    def __init__(self, app: ASGIApp, metrics: Metrics, endpoints: frozenset[str]):
        """endpoints: paths of all routes."""
        self._app = app
        self._metrics = metrics
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        endpoint, method = self._endpoint(scope["path"]), known_method(scope["method"])
        has_answered = False

        async def counting_send(message: Message) -> None:
            nonlocal has_answered
            if message["type"] == "http.response.start":
                has_answered = True
                self._metrics.http_answered(endpoint, method, message["status"])
            await send(message)

        self._metrics.http_received(endpoint, method)
        try:
            await self._app(scope, receive, counting_send)
        except Exception:
            if not has_answered:
                self._metrics.http_answered(endpoint, method, 500)
            raise
        finally:
            self._metrics.http_done(endpoint, method)

    def _endpoint(self, path: str) -> str:
        if path in self._endpoints:
            return path
        return MODEL_PREFIX + "{model}" if path.startswith(MODEL_PREFIX) else "other"


def known_method(method: str) -> str:
    return method if method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS") else "other"


class Trace:
    """Remembers the caller of each request to the model, and reports those that were refused before a generation began."""

    def __init__(self, app: ASGIApp, tracing: "Tracing"):
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in TRACED_PATHS:
            await self._app(scope, receive, send)
            return
        caller = scope[CALLER] = Caller({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
        status = 0

        async def watching_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and not caller.has_generations:
                self._tracing.refused(caller, scope["path"], status, message_of(message.get("body") or b""))
                caller.begin()
            await send(message)

        try:
            await self._app(scope, receive, watching_send)
        except Exception as error:
            if not caller.has_generations:
                self._tracing.refused(caller, scope["path"], 500, type(error).__name__)
            raise


def message_of(body: bytes) -> str:
    """What an error body says."""
    return str(orjson.loads(body)["message"]) if body else ""


def caller_of(request: Request) -> Caller | None:
    """None without --enable-trace."""
    caller: Caller | None = request.scope.get(CALLER)
    return caller
