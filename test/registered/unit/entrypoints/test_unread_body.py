"""With `Connection: close`, an answer that leaves before the body was read reaches a client that is still sending."""
import json
import socket
import time

import pytest

from kits.front import Front
from sglane.entrypoints import unread_body

PIECE = b"x" * (64 << 10)
NUM_PIECES = 40  # more than the buffers of both sockets hold
LIMIT = 1 << 20
OLD = "HTTP/1.0"
KEY = "Authorization: Bearer a-key"


@pytest.fixture(scope="module")
def front(config, tokenizer):
    with Front(config, tokenizer, api_key="a-key", max_body_bytes=4 * LIMIT) as running:
        yield running


@pytest.fixture(scope="module")
def small(config, tokenizer):
    with Front(config, tokenizer, api_key="a-key", max_body_bytes=LIMIT * 2) as running:
        yield running


def connect(front):
    host, port = front.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20.0)


def head(path, *headers, method="POST", version="HTTP/1.1"):
    return "\r\n".join([f"{method} {path} {version}", "Host: here", *headers, "", ""]).encode()


def everything(connection):
    """Status and JSON (or text) of the answer, read up to the end of the connection. A reset raises."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    top, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in top.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    assert len(body) == length, data
    return int(top.split()[1]), body


@pytest.mark.parametrize(("closing", "chunked"), [("close", False), ("keep-alive, Close", True), (OLD, False)])  # HTTP/1.0 has no chunks
@pytest.mark.parametrize(("path", "headers", "status"), [
    ("/generate", [], 401), ("/no/such/route", [KEY], 404), ("/ping", [KEY], 405), ("/generate", [KEY, "Content-Type: text/plain"], 415),
    ("/flush_cache", [KEY], 200),
])
def test_the_answer_arrives(front, path, headers, status, closing, chunked):
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(PIECE) * NUM_PIECES}"
    more = [] if closing == OLD else [f"Connection: {closing}"]
    with connect(front) as connection:
        connection.sendall(head(path, length, *more, *headers, version=OLD if closing == OLD else "HTTP/1.1"))
        time.sleep(0.1)  # the answer has left
        for _ in range(NUM_PIECES):
            connection.sendall(b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if chunked else PIECE)
        connection.sendall(b"0\r\n\r\n" if chunked else b"")
        time.sleep(0.1)
        found, body = everything(connection)
    assert found == status, body
    assert status == 200 or json.loads(body)["code"] == status


def test_a_body_over_the_limit(small):
    with connect(small) as connection:
        connection.sendall(head("/generate", KEY, "Connection: close", f"Content-Length: {len(PIECE) * NUM_PIECES}"))
        for _ in range(NUM_PIECES):
            connection.sendall(PIECE)
        time.sleep(0.1)
        assert everything(connection)[0] == 413


def test_the_answer_does_not_wait_for_the_body(front):
    with connect(front) as connection:
        connection.sendall(head("/generate", "Connection: close", "Content-Length: 1000"))
        begin = time.monotonic()
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401")
        assert time.monotonic() - begin < 2.0


def test_a_client_that_never_sends_its_body_is_cut_off(front, monkeypatch):
    monkeypatch.setattr(unread_body, "PATIENCE_S", 0.2)
    with connect(front) as connection:
        connection.sendall(head("/generate", "Connection: close", "Content-Length: 1000"))
        assert everything(connection)[0] == 401
    assert front.http.get("/ping").status_code == 200


def test_an_endless_body_is_cut_off(small):
    with connect(small) as connection:
        connection.sendall(head("/generate", "Connection: close", "Transfer-Encoding: chunked"))
        with pytest.raises(OSError):  # noqa: PT011 - a reset or a broken pipe, as it comes
            for _ in range(1000):
                connection.sendall(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))


@pytest.mark.parametrize("extra", ["Expect: 100-continue", "X: y"])
def test_a_client_that_asks_first_need_not_wait(front, extra):
    length = "Content-Length: 1000" if extra.startswith("Expect") else "Content-Length: 0"
    with connect(front) as connection:
        begin = time.monotonic()
        connection.sendall(head("/generate", "Connection: close", length, extra))
        assert everything(connection)[0] == 401
        assert time.monotonic() - begin < 2.0


def test_open_connections_go_on(front):
    """Without `Connection: close` the same connection serves the next request."""
    with connect(front) as connection:
        connection.sendall(head("/generate", f"Content-Length: {len(PIECE)}") + PIECE + head("/ping", "Connection: close", method="GET"))
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
    assert data.startswith(b"HTTP/1.1 401") and b"HTTP/1.1 200" in data
