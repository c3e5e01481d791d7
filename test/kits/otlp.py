"""A collector for tests: takes OTLP spans over HTTP or gRPC on a free port of 127.0.0.1 and keeps them.

    with Collector("grpc") as collector:
        ...  # a server with --otlp-traces-endpoint collector.address
        (span,) = collector.wait_for(1, "llm_request")
"""
import gzip
import http.server
import socket
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc

ERROR = 2  # StatusCode of the protocol
SERVER = 2  # SpanKind


@dataclass(frozen=True)
class Span:
    """Ids in hexadecimal, times in nanoseconds since 1970."""

    name: str
    trace_id: str
    id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]


def plain(pairs: Any) -> dict[str, Any]:
    """Attributes of the protocol -> a dict."""
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [getattr(item, item.WhichOneof("value")) for item in value.values] if kind == "array_value" else value
    return found


def spans_of(message: Any) -> list[Span]:
    return [
        Span(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.kind, span.start_time_unix_nano,
             span.end_time_unix_nano, span.status.code, span.status.message, plain(span.attributes), plain(group.resource.attributes))
        for group in message.resource_spans for scope in group.scope_spans for span in scope.spans
    ]


class Collector:
    """protocol: grpc or http/protobuf."""

    def __init__(self, protocol: str):
        self._protocol = protocol
        self._lock = threading.Condition()
        self._spans: list[Span] = []

    def __enter__(self) -> Self:
        if self._protocol == "grpc":
            self._grpc = grpc.server(futures.ThreadPoolExecutor(2))
            service_grpc.add_TraceServiceServicer_to_server(self, self._grpc)
            self.address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
            self._grpc.start()
        else:
            self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
            self.address = f"127.0.0.1:{self._http.server_port}"
            threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._protocol == "grpc":
            self._grpc.stop(None).wait()
        else:
            self._http.shutdown()
            self._http.server_close()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own name)
        self._keep(request)
        return service.ExportTraceServiceResponse()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        keep = self._keep

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                body = self.rfile.read(int(self.headers["Content-Length"]))
                keep(service.ExportTraceServiceRequest.FromString(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _keep(self, message: Any) -> None:
        with self._lock:
            self._spans += spans_of(message)
            self._lock.notify_all()

    def wait_for(self, count: int, name: str, timeout_s: float = 20.0) -> list[Span]:
        """At least `count` spans of a name, in the order in which they came."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while len(self.named(name)) < count:
                assert self._lock.wait(deadline_s - time.monotonic()), f"{len(self.named(name))} spans {name!r} after {timeout_s} s, not {count}"
            return self.named(name)

    def named(self, name: str) -> list[Span]:
        return [span for span in self._spans if span.name == name]

    def children(self, parent: Span) -> dict[str, Span]:
        """By name. A batch ends with the span itself, so they are there when it is."""
        return {span.name: span for span in self._spans if span.parent_id == parent.id}


class BlackHole:
    """A collector that takes connections and never says a word."""

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
