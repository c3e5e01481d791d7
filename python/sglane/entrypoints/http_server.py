"""The ASGI application: routes and error shapes. Requests are validated by hand, so no route has a pydantic model."""
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

import sglane
from sglane.entrypoints.admin_api import AdminApi
from sglane.entrypoints.errors import CLIENT_CLOSED_REQUEST, ApiError, ClientGone, error_response
from sglane.entrypoints.load_api import LoadApi
from sglane.entrypoints.metrics_api import MetricsApi
from sglane.entrypoints.middleware import BodyLimit, HttpCount, KeyCheck
from sglane.entrypoints.native_api import NativeApi
from sglane.entrypoints.openai.chat import ChatApi
from sglane.entrypoints.openai.completions import CompletionsApi
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.text_api import TextApi

logger = logging.getLogger(__name__)

JSON_BODY = {"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; the message names it"},
    413: {"description": "The body is too large"},
    415: {"description": "The body is not JSON"},
    503: {"description": "Starting, shutting down, or the queue is full"},
}


def make_app(server: ServerState) -> FastAPI:
    """All routes of one server."""
    app = FastAPI(title="sglane", version=sglane.__version__)
    admin, native, text, load = AdminApi(server), NativeApi(server), TextApi(server), LoadApi(server)

    def get(path: str, handler: Any, method: str = "GET") -> None:
        app.add_api_route(path, handler, methods=[method], response_model=None, responses={503: ERRORS[503]})

    def post(path: str, handler: Any, method: str = "POST") -> None:
        app.add_api_route(path, handler, methods=[method], response_model=None, responses=ERRORS, openapi_extra=JSON_BODY)

    def head(path: str, handler: Any) -> None:
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)

    post("/generate", native.generate)  # routes are tried in this order: busy ones first
    post("/v1/completions", CompletionsApi(server).complete)
    post("/v1/chat/completions", ChatApi(server).complete)
    post("/generate", native.generate, "PUT")
    get("/ping", admin.ping)
    get("/health", admin.health)
    get("/v1/health", admin.health)
    get("/health_generate", admin.health_generate)
    get("/ready", admin.ready)
    get("/model_info", admin.model_info)
    get("/get_model_info", admin.model_info)
    get("/server_info", admin.server_info)
    get("/get_server_info", admin.server_info)
    get("/flush_cache", admin.flush_cache)
    get("/flush_cache", admin.flush_cache, "POST")
    get("/v1/models", admin.models)
    get("/v1/models/{model:path}", admin.model)
    post("/abort_request", admin.abort_request)
    for prefix in ("", "/v1"):
        post(f"{prefix}/tokenize", text.tokenize)
        post(f"{prefix}/detokenize", text.detokenize)
    get("/v1/loads", load.loads)
    get("/get_load", load.get_load)
    head("/ping", admin.ping)
    head("/health", admin.health)
    head("/ready", admin.ready)
    app.add_middleware(BodyLimit, max_bytes=server.args.max_body_bytes)
    if server.args.api_key or server.args.admin_api_key:
        app.add_middleware(KeyCheck, api_key=server.args.api_key, admin_api_key=server.args.admin_api_key)
    if server.metrics is not None:
        scrape = MetricsApi(server, server.metrics).scrape
        get("/metrics", scrape)
        head("/metrics", scrape)
        endpoints = frozenset(route.path for route in app.routes if isinstance(route, Route))
        app.add_middleware(HttpCount, metrics=server.metrics, endpoints=endpoints)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 in the same shape as everything else."""
    assert isinstance(error, HTTPException)
    response = error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    """The traceback is logged by the server; the client is told no details."""
    return error_response(ApiError(500, f"internal error: {type(error).__name__}"))
