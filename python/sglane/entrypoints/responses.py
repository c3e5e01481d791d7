"""HTTP responses that follow a job: one JSON body at its end, or server-sent events while it runs. A client that leaves ends the job."""
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from sglane.entrypoints.engine_client import Job
from sglane.entrypoints.errors import CLIENT_CLOSED_REQUEST, ApiError, ClientGone, error_response, stream_error_body
from sglane.entrypoints.generation import Generation

DONE = b"data: [DONE]\n\n"
#: UTF-8 of the characters U+0085, U+2028, U+2029, which JSON allows inside a string but many readers of lines (httpx) split at -> their escapes.
LINE_ENDS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}


def json_response(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def event(body: Any) -> bytes:
    """A server-sent event of one line, also for readers that end a line where `str.splitlines` does."""
    payload = orjson.dumps(body)
    if b"\xe2\x80" in payload or b"\xc2\x85" in payload:
        for raw, escaped in LINE_ENDS.items():
            payload = payload.replace(raw, escaped)
    return b"data: " + payload + b"\n\n"


async def _watch(receive: Receive, job: Job) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    job.leave()


@asynccontextmanager
async def following(receive: Receive, job: Job) -> AsyncIterator[None]:
    """Ends the job when the client leaves, and in any case at the end of the block."""
    watcher = asyncio.create_task(_watch(receive, job))
    try:
        yield
    finally:
        watcher.cancel()
        job.close()


async def answer(request: Request, job: Job, make_body: Callable[[list[Generation]], Any]) -> Response:
    """Wait for the whole job, then answer with `make_body(generations)`. Raises ApiError if a generation was refused or failed."""
    async with following(request.receive, job):
        try:
            return json_response(make_body(await job.all_done()))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """A job as server-sent events. Before the first event an error is an HTTP error; later it is an event. `[DONE]` ends every stream."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, events: Callable[[], AsyncIterator[bytes]]):
        super().__init__(headers={"Cache-Control": "no-cache"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._job = job
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def write(chunk: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        async with following(receive, self._job):
            try:
                async for chunk in self._events():
                    await write(chunk)
                await write(DONE)
            except ClientGone:
                return
            except ApiError as error:
                if not started:
                    await error_response(error)(scope, receive, send)
                    return
                await write(event(stream_error_body(error)) + DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def due_generations(job: Job) -> AsyncIterator[list[Generation]]:
    """Rounds of generations with something to send, by their stream interval.

    A round must be turned into bytes before the next await: generations go on meanwhile. Raises ApiError when one was refused or failed.
    """
    sent: dict[int, int] = {}  # output tokens at the last round that a generation was part of
    num_running = len(job.generations)
    while num_running:
        due = []
        failure: ApiError | None = None
        for generation in await job.changes():
            if generation.finish is not None:
                num_running -= 1
                if generation.finish.status_code:
                    failure = failure or ApiError(generation.finish.status_code, generation.finish.message)
                    continue
            last = sent.get(generation.index)
            num_tokens = generation.num_output_tokens
            if generation.finish is None and last is not None and num_tokens - last < generation.text_params.stream_interval:
                continue
            sent[generation.index] = num_tokens
            due.append(generation)
        if due:
            yield due
        if failure is not None:
            raise failure
