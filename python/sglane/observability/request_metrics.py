"""Counters and histograms of requests, as the front sees them. Their sums are the sums of what the answers said."""
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from sglane.observability.requests import Ending, Record

#: Upper bounds of the buckets. Seconds.
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
BETWEEN_TOKENS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4)
STAGE_S = tuple(round(0.001 * 1.62**i, 6) for i in range(30))
WHOLE_REQUEST_S = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 2400)


@dataclass(frozen=True)
class Children:
    """The metrics of one set of labels, looked up once: they are used for every token."""

    requests: Counter
    aborted: Counter
    prompt: Counter
    output: Counter
    cached_device: Counter
    cached_host: Counter
    first_token: Histogram
    between: Histogram
    per_token: Histogram
    whole: Histogram
    tokenize: Histogram
    prefill: Histogram
    decode: Histogram


class RequestMetrics:
    """A sink of `RequestTracker`. Prompt and cached tokens count when the first token comes, output tokens as they come."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]):
        """labels: the same on every sample."""
        names = [*labels, "is_streaming"]
        self._labels = labels

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"sglang:{name}", text, [*names, *more], registry=registry)

        def histogram(name: str, text: str, bounds_s: tuple[float, ...]) -> Histogram:
            return Histogram(f"sglang:{name}", text, names, registry=registry, buckets=bounds_s)

        self._requests = counter("num_requests_total", "Generations that ended, one per prompt and choice")
        self._aborted = counter("num_aborted_requests_total", "Generations that ended early: aborted, refused, failed, or the client left")
        self._prompt = counter("prompt_tokens_total", "Prompt tokens, the cached ones included")
        self._output = counter("generation_tokens_total", "Output tokens")
        self._cached = counter("cached_tokens_total", "Prompt tokens that were not computed", "cache_source")
        self._first_token = histogram("time_to_first_token_seconds", "Request received to first token", FIRST_TOKEN_S)
        self._between = histogram("inter_token_latency_seconds", "Time between two output tokens of a generation", BETWEEN_TOKENS_S)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean time per output token after the first", BETWEEN_TOKENS_S)
        self._whole = histogram("e2e_request_latency_seconds", "Request received to its end", WHOLE_REQUEST_S)
        self._stage = Histogram("sglang:per_stage_req_latency_seconds", "Time of one stage of a request", [*names, "stage"], registry=registry,
                                buckets=STAGE_S)
        self._of = {streams: self._make(streams) for streams in (False, True)}  # everything is there from the start, at zero

    def _make(self, streams: bool) -> "Children":
        values = (*self._labels.values(), "true" if streams else "false")
        return Children(
            *(metric.labels(*values) for metric in (self._requests, self._aborted, self._prompt, self._output)),
            *(self._cached.labels(*values, source) for source in ("device", "host")),
            *(metric.labels(*values) for metric in (self._first_token, self._between, self._per_token, self._whole)),
            *(self._stage.labels(*values, stage) for stage in ("tokenize", "prefill_forward", "decode_loop")),
        )

    def started(self, record: Record) -> None:
        """Counted at the end."""

    def tokens(self, record: Record, num_new: int, interval_s: float | None) -> None:
        of = self._of[record.streams]
        of.output.inc(num_new)
        if interval_s is None:
            assert record.first_token_s is not None
            of.first_token.observe(record.first_token_s - record.received_s)
            of.prompt.inc(record.num_prompt_tokens)
            of.cached_device.inc(record.num_cached_device)
            of.cached_host.inc(record.num_cached_host)
            return
        for _ in range(num_new):
            of.between.observe(interval_s / num_new)

    def ended(self, record: Record, ending: Ending) -> None:
        of = self._of[record.streams]
        of.requests.inc()
        if ending.reason in ("abort", "left"):
            of.aborted.inc()
            return
        of.whole.observe(ending.e2e_s)
        of.tokenize.observe(record.submitted_s - record.received_s)
        if record.first_token_s is not None and record.last_token_s is not None:
            of.prefill.observe(record.first_token_s - record.admitted_s)
            of.decode.observe(record.last_token_s - record.first_token_s)
        if record.num_output_tokens > 1 and record.first_token_s is not None and record.last_token_s is not None:
            of.per_token.observe((record.last_token_s - record.first_token_s) / (record.num_output_tokens - 1))
