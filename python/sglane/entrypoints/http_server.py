"""The ASGI application: routes and error shapes. Requests are validated by hand, so no route has a pydantic model."""
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

import sglane
from sglane.entrypoints import route_docs as says
from sglane.entrypoints.admin_api import AdminApi
from sglane.entrypoints.errors import CLIENT_CLOSED_REQUEST, ApiError, ClientGone, error_response
from sglane.entrypoints.load_api import LoadApi
from sglane.entrypoints.metrics_api import MetricsApi
from sglane.entrypoints.middleware import OPEN_PATHS, BodyLimit, HttpCount, KeyCheck, Trace
from sglane.entrypoints.native_api import NativeApi
from sglane.entrypoints.openai.chat import ChatApi
from sglane.entrypoints.openai.completions import CompletionsApi
from sglane.entrypoints.operator_api import OperatorApi
from sglane.entrypoints.page_api import FILES, PageApi
from sglane.entrypoints.route_docs import Declaration
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.session_api import SessionApi
from sglane.entrypoints.text_api import TextApi
from sglane.entrypoints.unread_body import UnreadBody

#: (method, path, handler, what /openapi.json says)
AddRoute = Callable[[str, str, Any, Declaration], None]


def make_app(server: ServerState) -> FastAPI:
    """All routes of one server."""
    app = FastAPI(title="sglane", version=sglane.__version__)
    needs_key = bool(server.args.api_key or server.args.admin_api_key)

    def route(method: str, path: str, handler: Any, declared: Declaration) -> None:
        app.add_api_route(path, handler, methods=[method], response_model=None, response_class=Response, openapi_extra=declared.extra(),
                          responses=declared.responses(needs_key and path not in OPEN_PATHS), include_in_schema=method != "HEAD")

    add_request_routes(route, server)
    add_state_routes(route, server)
    app.add_middleware(BodyLimit, max_bytes=server.args.max_body_bytes)
    if needs_key:
        app.add_middleware(KeyCheck, api_key=server.args.api_key, admin_api_key=server.args.admin_api_key)
    if server.tracing is not None:
        app.add_middleware(Trace, tracing=server.tracing)
    if server.metrics is not None:
        scrape = MetricsApi(server, server.metrics).scrape
        route("GET", "/metrics", scrape, says.METRICS)
        route("HEAD", "/metrics", scrape, says.METRICS)
        endpoints = frozenset(item.path for item in app.routes if isinstance(item, Route))
        app.add_middleware(HttpCount, metrics=server.metrics, endpoints=endpoints)
    app.add_middleware(UnreadBody, max_bytes=server.args.max_body_bytes)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    return app


def add_request_routes(route: AddRoute, server: ServerState) -> None:
    """Work for the model. Routes are tried in this order: busy ones first."""
    native, text = NativeApi(server), TextApi(server)
    route("POST", "/generate", native.generate, says.GENERATE)
    route("POST", "/v1/completions", CompletionsApi(server).complete, says.COMPLETIONS)
    route("POST", "/v1/chat/completions", ChatApi(server).complete, says.CHAT)
    route("PUT", "/generate", native.generate, says.GENERATE)
    sessions = SessionApi(server)
    route("POST", "/open_session", sessions.open, says.OPEN_SESSION)
    route("POST", "/close_session", sessions.close, says.CLOSE_SESSION)
    for prefix in ("", "/v1"):
        route("POST", f"{prefix}/tokenize", text.tokenize, says.TOKENIZE)
        route("POST", f"{prefix}/detokenize", text.detokenize, says.DETOKENIZE)


def add_state_routes(route: AddRoute, server: ServerState) -> None:
    """Questions about the server, and an operator's verbs."""
    admin, load = AdminApi(server), LoadApi(server)
    for method in ("GET", "HEAD"):
        route(method, "/ping", admin.ping, says.PROBE)
        route(method, "/health", admin.health, says.PROBE)
        route(method, "/ready", admin.ready, says.PROBE)
    route("GET", "/v1/health", admin.health, says.PROBE)
    route("GET", "/health_generate", admin.health_generate, says.PROBE)
    for prefix in ("/", "/get_"):
        route("GET", f"{prefix}model_info", admin.model_info, says.QUESTION)
        route("GET", f"{prefix}server_info", admin.server_info, says.QUESTION)
    route("GET", "/v1/models", admin.models, says.QUESTION)
    route("GET", "/v1/models/{model:path}", admin.model, says.MODEL)
    route("GET", "/v1/loads", load.loads, says.LOADS)
    route("GET", "/get_load", load.get_load, says.QUESTION)
    for method in ("GET", "POST"):
        route(method, "/flush_cache", admin.flush_cache, says.FLUSH)
    route("POST", "/abort_request", admin.abort_request, says.ABORT)
    operator = OperatorApi(server)
    route("POST", "/pause_generation", operator.pause_generation, says.PAUSE)
    route("POST", "/continue_generation", operator.continue_generation, says.CONTINUE)
    route("POST", "/configure_logging", operator.configure_logging, says.CONFIGURE_LOGGING)
    for method in ("GET", "POST"):
        route(method, "/start_profile", operator.start_profile, says.START_PROFILE[method])
        route(method, "/stop_profile", operator.stop_profile, says.STOP_PROFILE)
    page = PageApi()
    for path, (_, media) in FILES.items():
        for method in ("GET", "HEAD"):
            route(method, path, page.file, says.file(media))


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 in the same shape as everything else."""
    assert isinstance(error, HTTPException)
    response = error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    headers = dict(error.headers or {})
    if error.status_code == 405:  # a path may have several routes, one for each method
        routes = [route for route in request.app.routes if isinstance(route, Route) and route.path_regex.match(request.url.path)]
        headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
    response.headers.update(headers)
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    """The traceback is logged by the server; the client is told no details."""
    return error_response(ApiError(500, f"internal error: {type(error).__name__}"))
