"""Hostile HTTP requests: valid bodies of every POST route, mutated. Seeded: request `index` of seed `seed` is always the same.

    found = Fuzzer(server.url, schema_fields(server), seed=1).run(1000)
    assert not found, report(found)

Raw sockets, so that methods, headers and bytes may be anything. What must hold of every answer is in `complaint`.
"""
import asyncio
import json
import random
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from kits.fuzz_corpus import CORPUS, CURIOUS_HEADERS, CURIOUS_KINDS, CURIOUS_PATHS, INSERTS, NUMBERS, OPERATOR, OPTIONAL, TEXTS

TIMEOUT_S = 60.0
CONCURRENCY = 8
MAX_COMPLAINTS = 5
MAX_PLACE_DEPTH = 12
MAX_BODY_BYTES = 100_000  # larger ones are not changed any more
JSON_TYPE = "application/json"

@dataclass(frozen=True)
class Hostile:
    """One request. content: the body's bytes."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    content: bytes
    body: Any = None  # what the content was written from, if it can be shrunk

    def wire(self, host: str) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + self.content

    def curl(self, url: str) -> str:
        headers = " ".join(f"-H {shlex.quote(f'{name}: {value}')}" for name, value in self.headers if name.lower() != "content-length")
        escaped = "".join(chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in self.content)
        return f"curl -sS -X {self.method} {shlex.quote(url + self.path)} {headers} --data-binary $'{escaped}'"


@dataclass(frozen=True)
class Answer:
    """status 0: none came. headers in lower case."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    error: str = ""


@dataclass(frozen=True)
class Complaint:
    seed: int
    index: int
    what: str
    request: Hostile


class HasOpenApi(Protocol):
    def get(self, path: str, **params: Any) -> Any: ...


def schema_fields(server: HasOpenApi) -> dict[str, list[str]]:
    """POST route -> names of its body's fields, from /openapi.json. Raises AssertionError for a POST route without a corpus.

    Left out are OPERATOR routes.
    """
    fields = {}
    for path, operations in server.get("/openapi.json").json()["paths"].items():
        if "post" in operations and path not in OPERATOR:
            content = operations["post"].get("requestBody", {}).get("content", {})
            fields[path] = list(content.get(JSON_TYPE, {}).get("schema", {}).get("properties", {}))
    missing = set(fields) - set(CORPUS)
    assert not missing, f"POST routes without a corpus: {missing}"
    return fields


# --- making ------------------------------------------------------------------------------------------------------------


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, and some that are none (NaN, half a surrogate pair)."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice([None, True, False, [], {}])
    if kind == 7 and depth == 0:
        value: Any = rng.choice([1, "x", {}])
        for _ in range(rng.choice([5, 60, 150, 250, 400])):
            value = [value] if rng.random() < 0.5 else {rng.choice(["a", "items", "properties", "anyOf", "$ref"]): value}
        return value
    if depth > 2:
        return 1
    if kind == 8:
        return [junk(rng, depth + 1) for _ in range(rng.choice([1, 2, 5]))] * (rng.choice([1, 1, 300]) if depth == 0 else 1)
    names = ["role", "content", "type", "text", "5", "schema", "rid", "function", ""]
    return {rng.choice(names): junk(rng, depth + 1) for _ in range(rng.choice([1, 3]))}


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside (not of the whole), but of very deep ones."""
    if len(at) > MAX_PLACE_DEPTH:
        return []
    items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:20] if isinstance(value, list) else []
    return [path for key, item in items for path in [(*at, key), *places(item, (*at, key))]]


def changed(rng: random.Random, body: Any) -> Any:
    """A copy with one value replaced, dropped, doubled or wrapped."""
    body = json.loads(json.dumps(body))
    found = places(body)
    if not found:
        return junk(rng)
    *parents, key = rng.choice(found)
    holder = body
    for parent in parents:
        holder = holder[parent]
    kind, old = rng.randrange(8), holder[key]
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = [old]
    elif kind == 2:
        holder[key] = str(old)
    elif kind == 3 and isinstance(old, list | str):
        holder[key] = old * rng.choice([0, 2, 30])
    elif kind == 4 and isinstance(old, dict):
        holder[key] = list(old.items())
    else:
        holder[key] = junk(rng)
    return body


def grown(rng: random.Random, route: str, body: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A copy with fields added: valid ones mostly."""
    body = json.loads(json.dumps(body))
    optional = OPTIONAL.get(route, {})
    for name in rng.sample(sorted(optional), min(len(optional), rng.choice([0, 1, 2, 5]))):
        value = optional[name]
        if name == "sampling_params" and isinstance(body.get(name, {}), dict):
            picked = rng.sample(sorted(value), rng.choice([1, 2, 4]))
            value = {**body.get(name, {}), **{key: value[key] for key in picked}}
        body[name] = value
    if names and rng.random() < 0.1:
        body[rng.choice(names)] = junk(rng)
    return body


def written(rng: random.Random, body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.7)
    if isinstance(body, dict) and body and rng.random() < 0.05:  # a key twice
        key = rng.choice(list(body))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(junk(rng))}}}"
    return text.encode("utf-8", "surrogatepass")


def broken(rng: random.Random, content: bytes) -> bytes:
    """Cut, flipped, or with bytes put in."""
    kind, place = rng.randrange(4), rng.randrange(len(content) + 1)
    if kind == 0:
        return content[:place]
    if kind == 1 and content:
        changed_bytes = bytearray(content)
        for _ in range(rng.choice([1, 3, 10])):
            changed_bytes[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return bytes(changed_bytes)
    return content[:place] + rng.choice(INSERTS) + content[place:]


def hostile(seed: int, index: int, fields: Mapping[str, Sequence[str]]) -> Hostile:
    """Request `index` of `seed`."""
    rng = random.Random(f"{seed}/{index}")
    route = rng.choices(list(CORPUS), [4 if path in OPTIONAL else 1 for path in CORPUS])[0]
    body: Any = grown(rng, route, rng.choice(CORPUS[route]), fields.get(route, ()))
    content = written(rng, body)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        if len(content) < MAX_BODY_BYTES:
            body = changed(rng, body)
            content = written(rng, body)
    method, kind, path = "POST", JSON_TYPE, route
    fate = rng.random()
    if fate < 0.1:
        content, body = broken(rng, content), None
    elif fate < 0.12:
        method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "FOO"])
    elif fate < 0.14:
        kind = rng.choice(CURIOUS_KINDS)
    elif fate < 0.16:
        path += rng.choice(CURIOUS_PATHS)
    headers = [("Content-Type", kind), ("Content-Length", str(len(content)))]
    if fate > 0.98:
        headers.append(rng.choice(CURIOUS_HEADERS))
    return Hostile(method, path, tuple(headers), content, body)


# --- judging -----------------------------------------------------------------------------------------------------------


def complaint(request: Hostile, answer: Answer) -> str:
    """What is wrong with the answer; empty if nothing is."""
    if answer.status == 0:
        return f"no answer: {answer.error}"
    if answer.status >= 500 and not (answer.status == 503 and "retry-after" in answer.headers):
        return f"status {answer.status}: {answer.body[:300]!r}"
    if request.method == "HEAD":
        return ""
    if answer.status >= 400:
        return error_complaint(answer)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        if not answer.body.rstrip().endswith(b"data: [DONE]"):
            return f"the stream has no [DONE]: {answer.body[-200:]!r}"
        events = [json.loads(line[6:]) for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
        failed = [item["error"] for item in events if "error" in item and item["error"]["code"] >= 500]
        return f"an error in the stream: {failed[0]}" if failed else ""
    if answer.headers.get("content-type") == JSON_TYPE:
        json.loads(answer.body)
    return ""


def error_complaint(answer: Answer) -> str:
    if answer.body == b"Invalid HTTP request received.":
        return ""  # it was not even HTTP
    try:
        body = json.loads(answer.body)
    except ValueError:
        return f"an error that is not JSON: {answer.status} {answer.body[:200]!r}"
    wanted = {"object", "message", "type", "param", "code", "error"}
    if set(body) != wanted or body["code"] != answer.status or body["error"]["message"] != body["message"] or not body["message"]:
        return f"an error in another shape: {answer.status} {answer.body[:200]!r}"
    return f"a message of {len(body['message'])} characters" if len(body["message"]) > 6000 else ""


# --- sending -----------------------------------------------------------------------------------------------------------


async def send(url: str, request: Hostile, timeout_s: float = TIMEOUT_S) -> Answer:
    """On a connection of its own, which the client closes: a server that closes first may lose its answer to a reset when bytes are left unread."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
            try:
                writer.write(request.wire(parts.netloc))
                return await read_answer(reader, request.method)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        return Answer(0, error=f"{type(error).__name__} {error}")


async def read_answer(reader: asyncio.StreamReader, method: str) -> Answer:
    status, headers = 100, dict[str, str]()
    while status == 100:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head.strip().split("\r\n")
        status = int(line.split(" ")[1])
        headers = {name.lower(): value.strip() for name, _, value in (item.partition(":") for item in lines)}
    if method == "HEAD":
        return Answer(status, headers)
    if headers.get("transfer-encoding") == "chunked":
        return Answer(status, headers, await read_chunks(reader))
    if "content-length" in headers:
        return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Answer(status, headers, await reader.read())


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts)


class Fuzzer:
    """Sends the requests of one seed, several at a time."""

    def __init__(self, url: str, fields: Mapping[str, Sequence[str]], seed: int):
        self.statuses: Counter[int] = Counter()
        self.slowest = (0.0, -1)  # seconds, request
        self._url = url
        self._fields = fields
        self._seed = seed

    def run(self, begin: int, end: int) -> list[Complaint]:
        """Requests begin to end (exclusive); what was wrong, smallest request that still shows it."""
        return asyncio.run(self._run(begin, end))

    async def _run(self, begin: int, end: int) -> list[Complaint]:
        indices, found = iter(range(begin, end)), list[Complaint]()

        async def work() -> None:
            for index in indices:
                if len(found) >= MAX_COMPLAINTS:
                    return
                request, begin_s = hostile(self._seed, index, self._fields), time.monotonic()
                answer = await send(self._url, request)
                self.slowest = max(self.slowest, (time.monotonic() - begin_s, index))
                self.statuses[answer.status] += 1
                what = complaint(request, answer)
                if what:
                    found.append(Complaint(self._seed, index, what, await self._smallest(request)))

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return found

    async def _smallest(self, request: Hostile) -> Hostile:
        """The request with every field left out that the complaint does not need."""
        is_small = False
        while not is_small and request.body is not None:
            is_small = True
            for place in places(request.body):
                smaller = without(request, place)
                if complaint(smaller, await send(self._url, smaller)):
                    request, is_small = smaller, False
                    break
        return request


def without(request: Hostile, place: Sequence[Any]) -> Hostile:
    body = json.loads(json.dumps(request.body))
    holder = body
    for key in place[:-1]:
        holder = holder[key]
    del holder[place[-1]]
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    headers = tuple((name, str(len(content)) if name == "Content-Length" else value) for name, value in request.headers)
    return replace(request, body=body, content=content, headers=headers)


def report(found: Sequence[Complaint], url: str) -> str:
    return "\n".join(f"seed {item.seed} request {item.index}: {item.what}\n  {item.request.curl(url)[:4000]}" for item in found)
