"""--log-requests: one line when a request is sent to the engine, one when it has ended. Every value is also a field of JSON logs."""
import logging
from typing import Any

import msgspec
import numpy as np

from sglane.observability.requests import Ending, Record

logger = logging.getLogger(__name__)

#: Most tokens and characters of a text in one line at level 2.
CUT = 2048


class RequestLog:
    """A sink of `RequestTracker`. level 0: sizes and times; 1: and sampling parameters; 2: and texts, cut; 3: and whole texts."""

    def __init__(self, level: int):
        self._level = level

    def set_level(self, level: int) -> None:
        self._level = level

    def started(self, record: Record) -> None:
        fields: dict[str, Any] = {"rid": record.name, "prompt_tokens": record.num_prompt_tokens, "stream": record.streams}
        if self._level >= 1:
            fields["sampling_params"] = msgspec.to_builtins(record.request.sampling)
            fields["priority"] = record.request.priority
        if self._level >= 2:
            fields["input_ids"] = np.frombuffer(record.request.input_ids, np.int32)[: self._limit()].tolist()
        self._write("Receive", fields)

    def tokens(self, record: Record, num_new: int, interval_s: float | None) -> None:
        """Nothing to say before the end."""

    def ended(self, record: Record, ending: Ending) -> None:
        first_s = None if record.first_token_s is None else round(record.first_token_s - record.received_s, 6)
        fields: dict[str, Any] = {
            "rid": record.name, "finish_reason": ending.reason, "prompt_tokens": record.num_prompt_tokens,
            "completion_tokens": record.num_output_tokens, "cached_tokens": record.num_cached_device + record.num_cached_host,
            "ttft_s": first_s, "e2e_s": round(ending.e2e_s, 6),
        }
        if ending.message:
            fields["error"] = ending.message
        if self._level >= 2:
            fields |= {"output_ids": list(ending.output_ids[: self._limit()]), "text": ending.text[: self._limit()]}
        self._write("Finish", fields)

    def _limit(self) -> int | None:
        return CUT if self._level == 2 else None

    def _write(self, verb: str, fields: dict[str, Any]) -> None:
        logger.info("%s: %s", verb, ", ".join(f"{key}={value!r}" for key, value in fields.items()), extra={"event": verb.lower(), **fields})
