"""What the front sees of each request, as it happens: one record per generation, handed to the sinks (metrics, request log)."""
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglane.plan.io_struct import GenerateRequest, RequestOutput


class Caller:
    """The HTTP request behind generations, as far as traces need it."""

    def __init__(self, headers: Mapping[str, str]):
        """headers: names in lower case."""
        self.headers = headers
        self.received_s = time.monotonic()
        self.has_generations = False

    def begin(self) -> None:
        """A generation was made of it."""
        self.has_generations = True


@dataclass(slots=True)
class Record:
    """One generation under way. Times by time.monotonic(). Written by `RequestTracker` only."""

    request: GenerateRequest
    name: str  # the client's rid
    streams: bool
    received_s: float
    submitted_s: float
    caller: Caller | None  # None without --enable-trace
    queue_s: float | None = None  # arrival at the planner to the first admission; None: not admitted yet
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_output_tokens: int = 0
    num_cached_device: int = 0
    num_cached_host: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.input_ids) // 4

    @property
    def admitted_s(self) -> float:
        """When the planner took it in; as long as it has not, when it was handed over."""
        return self.submitted_s + (self.queue_s or 0.0)


@dataclass(frozen=True)
class Ending:
    """How a generation ended. reason: stop, length, abort (by request, refused or failed), left (the client is gone)."""

    reason: str
    status_code: int  # 0: no error
    message: str
    text: str
    output_ids: Sequence[int]
    e2e_s: float


class RequestSink(Protocol):
    """Something that takes notes."""

    def started(self, record: Record) -> None:
        """It is on its way to the planner."""

    def tokens(self, record: Record, num_new: int, interval_s: float | None) -> None:
        """New output tokens; interval_s since the last ones, None for the first. The record is up to date."""

    def ended(self, record: Record, ending: Ending) -> None:
        """Nothing more will come."""


class RequestTracker:
    """Keeps the records; without sinks it does nothing."""

    def __init__(self, sinks: Sequence[RequestSink] = (), shows_times: bool = False):
        """shows_times: whether answers carry the times of their record."""
        self.shows_times = shows_times
        self._sinks = list(sinks)
        self._records: dict[str, Record] = {}  # by the planner's rid

    def add(self, sink: RequestSink) -> None:
        """It hears of what starts from now on, and at least of the end of what runs and has a record. Idempotent."""
        if sink not in self._sinks:
            self._sinks.append(sink)

    def remove(self, sink: RequestSink) -> None:
        """Idempotent."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    @property
    def num_records(self) -> int:
        return len(self._records)

    def started(self, request: GenerateRequest, name: str, streams: bool, received_s: float, caller: Caller | None = None) -> Record | None:
        """Returns the record, None if there is nobody to keep it for."""
        if not self._sinks:
            return None
        record = self._records[request.rid] = Record(request, name, streams, received_s, time.monotonic(), caller)
        for sink in self._sinks:
            sink.started(record)
        return record

    def admitted(self, queue_s: Mapping[str, float]) -> None:
        """What the planner says of first admissions: rid -> seconds in the queue."""
        for rid, waited_s in queue_s.items():
            record = self._records.get(rid)
            if record is not None:
                record.queue_s = waited_s

    def output(self, output: RequestOutput, num_kept: int) -> None:
        """A step's output. num_kept: output tokens that the answer has now (a stop string may have cut some)."""
        record = self._records.get(output.rid)
        if record is None or not output.token_ids:
            return
        now_s = time.monotonic()
        interval_s = None if record.last_token_s is None else now_s - record.last_token_s
        num_new = num_kept - record.num_output_tokens
        if record.first_token_s is None:
            record.first_token_s = now_s
            record.num_cached_device, record.num_cached_host = output.num_cached_device, output.num_cached_host
        record.last_token_s = now_s
        record.num_output_tokens = num_kept
        for sink in self._sinks:
            sink.tokens(record, num_new, interval_s)

    def ended(self, rid: str, reason: str, status_code: int = 0, message: str = "", text: str = "", output_ids: Sequence[int] = ()) -> None:
        record = self._records.pop(rid, None)
        if record is not None:
            ending = Ending(reason, status_code, message, text, output_ids, time.monotonic() - record.received_s)
            for sink in self._sinks:
                sink.ended(record, ending)
