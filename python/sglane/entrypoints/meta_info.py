"""`meta_info`: what SGLang's clients read of a generation beside its text."""
import time
from typing import Any

from sglane.entrypoints.generation import Finish, Generation, LogprobWish, TokenLogprob
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.observability.requests import Record
from sglane.plan.io_struct import SpecCounts


class MetaInfo:
    """Of the generations of one HTTP request."""

    def __init__(self, tokenizer: TextTokenizer | None, received_s: float):
        """received_s: time.monotonic() when the request came."""
        self._tokenizer = tokenizer
        self._received_s = received_s

    def of(self, generation: Generation, num_reasoning_tokens: int = 0) -> dict[str, Any]:
        """State of one generation so far."""
        finish, counts = generation.finish, generation.counts
        meta: dict[str, Any] = {
            "id": generation.name,
            "finish_reason": finish_reason(finish),
            "prompt_tokens": generation.num_prompt_tokens,
            "weight_version": "default",
            "num_retractions": counts.retractions,
            "total_retractions": counts.retractions,
            "reasoning_tokens": num_reasoning_tokens,
            "completion_tokens": generation.num_output_tokens,
            "cached_tokens": counts.cached,
            "cached_tokens_details": {"device": counts.cached_device, "host": counts.cached_host},
        }
        if generation.spec is not None:
            meta |= speculation(generation.spec, generation.num_output_tokens)
        if finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._received_s
            if generation.times is not None:
                meta |= times_of(generation.times, time.monotonic(), time.time())
        return meta | self._logprobs(generation) if generation.wish.output else meta

    def _logprobs(self, generation: Generation) -> dict[str, Any]:
        wish = generation.wish
        found: dict[str, Any] = {}
        for side, entries in (("input", generation.input_logprobs), ("output", generation.output_logprobs)):
            found[f"{side}_token_logprobs"] = [self._entry(entry.logprob, entry.token_id, wish) for entry in entries]
            found[f"{side}_token_logprobs_length"] = len(entries)
            if wish.num_top:
                found[f"{side}_top_logprobs"] = [self._top(entry, wish) for entry in entries]
            if wish.asked_ids:
                found[f"{side}_token_ids_logprobs"] = [self._asked(entry, wish) for entry in entries]
        return found

    def _entry(self, logprob: float | None, token_id: int, wish: LogprobWish) -> tuple[float | None, int, str | None]:
        text = self._tokenizer.token_text(token_id) if wish.with_text and self._tokenizer is not None else None
        return logprob, token_id, text

    def _top(self, entry: TokenLogprob, wish: LogprobWish) -> Any:
        return None if entry.logprob is None else [self._entry(logprob, token_id, wish) for logprob, token_id in entry.top]

    def _asked(self, entry: TokenLogprob, wish: LogprobWish) -> Any:
        return None if entry.logprob is None else [self._entry(logprob, token_id, wish) for logprob, token_id in zip(entry.asked, wish.asked_ids)]


def speculation(spec: SpecCounts, num_output_tokens: int) -> dict[str, Any]:
    """What it brought so far; ratios are 0 before the first verify step. Drafts have two names each, of older and of newer clients."""
    return {
        "spec_verify_ct": spec.num_verify_steps,
        "spec_accept_length": num_output_tokens / spec.num_verify_steps if spec.num_verify_steps else 0.0,
        "spec_accept_rate": spec.num_accepted / spec.num_drafts if spec.num_drafts else 0.0,
        "spec_accept_token_num": spec.num_accepted,
        "spec_draft_token_num": spec.num_drafts,
        "spec_accept_histogram": spec.histogram,
        "spec_num_correct_drafts": spec.num_accepted,
        "spec_num_proposed_drafts": spec.num_drafts,
        "spec_correct_drafts_histogram": spec.histogram,
    }


def mean_accepted(speculation: dict[str, Any] | None) -> float | None:
    """Tokens per verify step since the start. speculation: the planner's; None: the server does not speculate, or nothing was verified yet."""
    if speculation is None or not speculation["num_verify_steps"]:
        return None
    mean: float = speculation["num_tokens"] / speculation["num_verify_steps"]
    return mean


def times_of(record: Record, now_s: float, now_ts: float) -> dict[str, float]:
    """Of a generation that has ended. `*_ts` and `*_time` are seconds since 1970 (queue_time is a duration); what did not happen is left out.

    now_s, now_ts: the same moment by time.monotonic() and time.time().
    """
    offset_s = now_ts - now_s
    times = {
        "request_received_ts": record.received_s + offset_s,
        "api_server_dispatch_finish_ts": record.submitted_s + offset_s,
        "request_finished_ts": now_ts if record.last_token_s is None else record.last_token_s + offset_s,
        "response_sent_to_client_ts": now_ts,
    }
    if record.queue_s is not None:
        times |= {"queue_time": record.queue_s, "forward_entry_time": record.admitted_s + offset_s}
    if record.first_token_s is not None and record.last_token_s is not None:
        times |= {"prefill_finished_time": record.first_token_s + offset_s, "first_token_latency": record.first_token_s - record.received_s}
        decode_s = record.last_token_s - record.first_token_s
        if decode_s > 0.0:
            times["decode_throughput"] = (record.num_output_tokens - 1) / decode_s
    return times


def finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": finish.length}
    return {"type": "abort", "message": finish.message, "status_code": finish.status_code or None, "err_type": None}
