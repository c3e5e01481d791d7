"""Request bodies: size cap, content type, JSON object."""
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from sglane.entrypoints.errors import ApiError, ClientGone
from sglane.entrypoints.validation import parse_object

MAX_BODY_BYTES = 64 << 20


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises 415, 413 or 400."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the content type must be application/json, not {kind!r}")
    return parse_object(await read_body(request))


async def read_body(request: Request) -> bytes:
    """At most MAX_BODY_BYTES."""
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(chunks)
