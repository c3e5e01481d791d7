"""Spans of requests for OpenTelemetry. The only module that imports it; loaded with --enable-trace alone.

A span and its parts are made when a generation ends, from times that are noted anyway, so that tokens cost nothing. A thread of the library
sends them in batches; when the collector is slow or gone its queue fills up and drops spans, and nobody waits.
"""
import threading
import time
from collections.abc import Iterator

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

import sglane
from sglane.observability.requests import Caller, Ending, Record

#: What the span of a generation is called; tools look for this name.
SPAN_NAME = "llm_request"
#: Path of an OTLP/HTTP receiver.
HTTP_PATH = "/v1/traces"
#: Seconds that the last spans get to leave when the server ends.
FAREWELL_S = 3.0
#: Reasons of an ending that are no success.
FAILED = ("abort", "left")


def make_exporter(protocol: str, endpoint: str | None) -> SpanExporter:
    """protocol: grpc or http/protobuf. endpoint: host:port or a URL; None: as the OTEL_EXPORTER_OTLP_* variables say.

    Raises ValueError for another protocol, ImportError without the protocol's package.
    """
    url = endpoint if endpoint is None or "://" in endpoint else f"http://{endpoint}"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=url)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=url if url is None or "/" in url.partition("://")[2] else url + HTTP_PATH)
    raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be grpc or http/protobuf, got {protocol!r}")


def make_resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count; the service is `sglane` unless they name it."""
    found = Resource.create({"service.version": sglane.__version__})
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found if is_named else found.merge(Resource({SERVICE_NAME: "sglane"}))


class Tracing:
    """A sink of `RequestTracker`: one span per generation, in the trace that the client's headers name."""

    def __init__(self, exporter: SpanExporter, model_name: str):
        self._model_name = model_name
        self._provider = TracerProvider(resource=make_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sglane", sglane.__version__)

    def started(self, record: Record) -> None:
        """The span is made at the end."""
        if record.caller is not None:
            record.caller.begin()

    def tokens(self, record: Record, num_new: int, interval_s: float | None) -> None:
        """The span is made at the end."""

    def ended(self, record: Record, ending: Ending) -> None:
        end_s = record.received_s + ending.e2e_s
        clock = WallClock()
        span = self._tracer.start_span(SPAN_NAME, context_of(record.caller), SpanKind.SERVER, start_time=clock.ns(record.received_s))
        if span.is_recording():
            span.set_attributes({**self._request_attributes(record), **answer_attributes(record, ending, end_s)})
            inside = set_span_in_context(span)
            for name, start_s, stop_s in parts(record, end_s):
                self._tracer.start_span(name, inside, start_time=clock.ns(start_s)).end(clock.ns(stop_s))
            if ending.reason in FAILED:
                fail(span, ending.status_code, ending.message)
        span.end(clock.ns(end_s))

    def refused(self, caller: Caller, path: str, status_code: int, message: str) -> None:
        """An HTTP request that got an error before it became a generation."""
        clock = WallClock()
        span = self._tracer.start_span(SPAN_NAME, context_of(caller), SpanKind.SERVER, start_time=clock.ns(caller.received_s))
        span.set_attributes({"gen_ai.request.model": self._model_name, "url.path": path})
        fail(span, status_code, message)
        span.end()

    def end(self) -> None:
        """Send what is left, but for FAREWELL_S at most: the collector may be gone."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(FAREWELL_S)

    def _request_attributes(self, record: Record) -> dict[str, AttributeValue]:
        sampling = record.request.sampling
        return {
            "gen_ai.request.id": record.name, "gen_ai.request.model": self._model_name, "gen_ai.response.model": self._model_name,
            "gen_ai.request.max_tokens": sampling.max_new_tokens, "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p, "gen_ai.request.top_k": sampling.top_k, "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty, "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.stream": record.streams,
        }


def context_of(caller: Caller | None) -> Context:
    """The client's place in its trace, read as OTEL_PROPAGATORS says (W3C trace context by default)."""
    return Context() if caller is None else propagate.extract(caller.headers, Context())


class WallClock:
    """time.monotonic() -> nanoseconds since 1970, with one offset for all times of a span."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns


def answer_attributes(record: Record, ending: Ending, end_s: float) -> dict[str, AttributeValue]:
    """Tokens and seconds. What never happened is left out."""
    found: dict[str, AttributeValue] = {
        "gen_ai.response.finish_reasons": [ending.reason],
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens, "gen_ai.usage.completion_tokens": record.num_output_tokens,
        "gen_ai.usage.cached_tokens": record.num_cached_device + record.num_cached_host,
        "gen_ai.usage.cached_tokens.device": record.num_cached_device, "gen_ai.usage.cached_tokens.host": record.num_cached_host,
        "gen_ai.latency.e2e": ending.e2e_s,
    }
    if record.queue_s is not None:
        found["gen_ai.latency.time_in_queue"] = record.queue_s
    if record.first_token_s is not None:
        found["gen_ai.latency.time_to_first_token"] = record.first_token_s - record.received_s
    seconds = {name: stop_s - start_s for name, start_s, stop_s in parts(record, end_s)}
    for name in ("prefill", "decode"):
        if name in seconds:
            found[f"gen_ai.latency.time_in_model_{name}"] = seconds[name]
    return found


def parts(record: Record, end_s: float) -> Iterator[tuple[str, float, float]]:
    """(name, start, stop) of what a generation went through, one after the other; the last one reaches to the end."""
    yield "tokenize", record.received_s, record.submitted_s
    if record.queue_s is None and record.first_token_s is None:
        yield "queue", record.submitted_s, end_s
        return
    admitted_s = record.submitted_s + (record.queue_s or 0.0)
    yield "queue", record.submitted_s, admitted_s
    if record.first_token_s is None:
        yield "prefill", admitted_s, max(end_s, admitted_s)
        return
    yield "prefill", admitted_s, max(record.first_token_s, admitted_s)
    yield "decode", record.first_token_s, end_s


def fail(span: Span, status_code: int, message: str) -> None:
    """An error status; with an HTTP status also as attributes."""
    span.set_status(Status(StatusCode.ERROR, message))
    if status_code:
        span.set_attributes({"http.response.status_code": status_code, "error.type": str(status_code)})
