"""Errors that a client gets to see, and their one JSON shape on all routes."""
from typing import Any

import orjson
from fastapi.responses import Response

#: What goes with a status: when to come back, which kind of key.
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it only shows in the access log


class ClientGone(ConnectionError):
    """The client closed the connection; there is nobody to answer."""


class ApiError(Exception):
    """An HTTP error: status, message, and the name of the field that is to blame (if one is)."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def bad_field(name: str, what: str) -> ApiError:
    """A 400 that names the field: `temperature must be ...`."""
    return ApiError(400, f"{name} {what}", name)


def error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 404:
        return "not_found_error"
    if status < 500:
        return "invalid_request_error"
    return "service_unavailable_error" if status == 503 else "internal_server_error"


def error_body(error: ApiError) -> dict[str, Any]:
    """Flat as SGLang writes it, and nested under `error` as OpenAI's SDK and SGLang's native clients look for it."""
    core = {"message": error.message, "type": error_type(error.status), "param": error.param, "code": error.status}
    return {"object": "error", **core, "error": core}


def stream_error_body(error: ApiError) -> dict[str, Any]:
    """The event that ends a stream which had already begun."""
    body = error_body(error)
    return {**body, "error": {**body["error"], "retryable": error.status >= 500}}


def error_response(error: ApiError) -> Response:
    return Response(orjson.dumps(error_body(error)), error.status, HEADERS.get(error.status), media_type="application/json")
