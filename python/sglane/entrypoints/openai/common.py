"""What the two OpenAI routes share: refused fields, usage, log probabilities, chunk heads."""
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglane.entrypoints.generation import Finish, Generation, TokenLogprob
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.entrypoints.validation import Fields

REFUSED = (
    "lora_path", "lora_id", "session_id", "custom_logit_processor", "return_hidden_states", "return_routed_experts",
    "return_spec_tokens_details", "use_beam_search", "input_embeds", "background",
)
FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True)
class Options:
    """Fields that shape the answer, not the generation."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    cached_details: bool
    cache_report: bool  # --enable-cache-report
    token_ids: bool  # of the output
    prompt_ids: bool
    meta_info: bool

    @staticmethod
    def read(fields: Fields, cache_report: bool) -> "Options":
        stream_options = Fields(fields.object("stream_options"))
        return Options(
            stream=fields.flag("stream"),
            include_usage=stream_options.flag("include_usage"),
            continuous_usage=stream_options.flag("continuous_usage_stats"),
            cached_details=fields.flag("return_cached_tokens_details"),
            cache_report=cache_report,
            token_ids=fields.flag("return_token_ids"),
            prompt_ids=fields.flag("return_prompt_token_ids") or fields.flag("return_token_ids"),
            meta_info=fields.flag("return_meta_info"),
        )


@dataclass(frozen=True)
class Head:
    """The fields that all bodies and chunks of one answer begin with."""

    id: str
    kind: str  # value of `object`
    created: int
    model: str
    received_s: float  # time.monotonic()

    @staticmethod
    def make(prefix: str, kind: str, fields: Fields, served_model_name: str) -> "Head":
        return Head(f"{prefix}-{random.getrandbits(128):032x}", kind, int(time.time()), fields.string("model") or served_model_name, time.monotonic())

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices, **more}


def one_per_prompt(generations: Sequence[Generation]) -> list[Generation]:
    """The first choice of every prompt."""
    first: dict[str, Generation] = {}
    for generation in generations:
        first.setdefault(generation.name, generation)
    return list(first.values())


def usage(generations: Sequence[Generation], options: Options, num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Prompts count once, however many choices they have."""
    prompts = one_per_prompt(generations)
    num_prompt = sum(prompt.num_prompt_tokens for prompt in prompts)
    num_output = sum(generation.num_output_tokens for generation in generations)
    details = {"cached_tokens": sum(prompt.counts.cached for prompt in prompts)} if options.cache_report else None
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output,
        "reasoning_tokens": num_reasoning_tokens, "prompt_tokens_details": details,
    }


def closing(generations: Sequence[Generation], options: Options, num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """What a body (or the usage chunk) ends with: usage, metadata, and `sglext` when it was asked for."""
    end = {"usage": usage(generations, options, num_reasoning_tokens), "metadata": {"weight_version": "default"}}
    return {**end, **extension(generations, options)}


def extension(generations: Sequence[Generation], options: Options) -> dict[str, Any]:
    """`sglext`, if the request asked for it; streams carry it with each choice's last chunk, since a usage chunk may not come."""
    if not options.cached_details:
        return {}
    prompts = one_per_prompt(generations)
    details = {"device": sum(prompt.counts.cached_device for prompt in prompts), "host": sum(prompt.counts.cached_host for prompt in prompts)}
    return {"sglext": {"cached_tokens_details": details}}


class Ids:
    """Token ids of one choice that were not sent yet, if the request wants them."""

    def __init__(self, generation: Generation, options: Options):
        self._generation = generation
        self._options = options
        self._num_sent: int | None = None

    def fields(self) -> dict[str, Any]:
        """Of the choice's next chunk, or of the whole choice: prompt_token_ids the first time, token_ids always."""
        first, start = self._num_sent is None, self._num_sent or 0
        found: dict[str, Any] = {"prompt_token_ids": self._generation.prompt_ids()} if first and self._options.prompt_ids else {}
        if self._options.token_ids:
            found["token_ids"] = self._generation.output_ids[start:]
        self._num_sent = self._generation.num_output_tokens
        return found


def ending(finish: Finish | None) -> dict[str, Any]:
    """finish_reason and matched_stop of a choice."""
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": FINISH_REASONS[finish.kind], "matched_stop": finish.matched}


def chat_logprobs(entries: Iterable[TokenLogprob], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The chat route's `logprobs`."""

    def item(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**item(entry.token_id, entry.logprob), "top_logprobs": [item(token_id, logprob) for logprob, token_id in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Iterable[TokenLogprob], tokenizer: TextTokenizer, offset: int) -> dict[str, Any]:
    """The completions route's `logprobs`. offset: characters of the choice's text in front of the first entry."""
    tokens, logprobs, tops, offsets = [], [], [], []
    for entry in entries:
        text = tokenizer.token_text(entry.token_id)
        tokens.append(text)
        logprobs.append(entry.logprob)
        tops.append(None if entry.logprob is None else {tokenizer.token_text(token_id): logprob for logprob, token_id in entry.top})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
