"""Request bodies: content type, JSON object. Their size is limited by `middleware.BodyLimit`."""
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from sglane.entrypoints.errors import ApiError, ClientGone
from sglane.entrypoints.validation import parse_object


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises 415, 413 or 400."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the content type must be application/json, not {kind!r}")
    return parse_object(await read_body(request))


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ClientGone."""
    try:
        return b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect as error:
        raise ClientGone from error
