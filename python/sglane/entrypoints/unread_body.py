"""Answers that leave before the request's body was read, on connections that end with them.

A socket that is closed with bytes in it that nobody read is reset, and a reset may overtake the answer: the client would see "connection reset"
in place of its 401 or 413. So the rest of the body is read and thrown away before the answer ends; the answer itself is sent at once.
"""
import asyncio
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Seconds that a client gets to send the rest of a body that nobody wants.
PATIENCE_S = 3.0


class UnreadBody:
    """Outermost middleware. Connections that stay open need none of this: there the server skips the body on its way to the next request."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        """max_bytes: most of a body that is read for nothing."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not leaves_body(scope["http_version"], scope["headers"]):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def watching_receive() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)
            return message

        async def lingering_send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False) and not is_read:
                await send({**message, "more_body": True})
                await self._skip(watching_receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, watching_receive, lingering_send)

    async def _skip(self, receive: Receive) -> None:
        """Read to the end of the body, but not for longer or more than is reasonable."""
        num_bytes = 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                while num_bytes <= self._max_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):  # also a client that has left
                        return
        except TimeoutError:
            pass  # it had its time; the connection is closed under it


def leaves_body(http_version: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the connection ends with the answer and a body comes unasked. (With `Expect: 100-continue` it waits to be asked.)"""
    found = {name.lower(): value.lower() for name, value in headers}
    ends = http_version == "1.0" or b"close" in [token.strip() for token in found.get(b"connection", b"").split(b",")]
    has_body = b"transfer-encoding" in found or found.get(b"content-length", b"0") != b"0"
    return ends and has_body and b"expect" not in found
