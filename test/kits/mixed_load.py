"""Requests that use every sampling feature of every generating route, in random mixtures. Request `index` of a seed is always the same.

    load = MixedLoad(server.url, seed=1)
    ends = load.run(0, 1000)  # how each request ended; raises AssertionError for an answer that is wrong in itself
"""
import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from kits.sse import collect_native, collect_openai

CONCURRENCY = 24
VOCAB = 500  # ids below it exist in all tiny checkpoints
WORDS = ("a lighthouse by the sea", "The capital", '{"name": "value"}', "žluťoučký kůň", "日本語", "👩‍👩‍👧", "once upon a time", "\n\n", "1, 2, 3")
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
NATIVE_NAMES = {"max": "max_new_tokens", "min": "min_new_tokens", "seed": "sampling_seed"}
OPENAI_NAMES = {"max": "max_tokens", "min": "min_tokens", "seed": "seed"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
#: Structured output: (field, value, what the whole answer matches).
GRAMMARS: list[tuple[str, Any, str]] = [
    ("regex", "[ab]{2,4}", "[ab]{2,4}"), ("ebnf", 'root ::= "yes" | "no" root', "(no)*yes"), ("json_schema", SCHEMA, r'\{\s*"a"\s*:\s*"[xy]"\s*\}'),
    ("regex", "(0|1){8}", "[01]{8}"),
]


@dataclass(frozen=True)
class Wanted:
    """One request and what its answer must be like."""

    path: str
    body: dict[str, Any]
    fate: str  # read, left (the client goes after the first event), aborted (by its rid)
    num_choices: int
    pattern: str  # that a finished answer matches; empty: any text


def mixture(rng: random.Random, names: dict[str, str]) -> dict[str, Any]:
    """Sampling fields. names: the route's spelling of max_new_tokens, min_new_tokens, sampling_seed."""
    options: list[tuple[float, str, Any]] = [
        (0.5, "temperature", rng.choice([0, 0.3, 1.0, 2.0])), (0.2, "top_p", 0.9), (0.2, "top_k", rng.choice([1, 5, 40])), (0.1, "min_p", 0.05),
        (0.15, "frequency_penalty", 0.5), (0.15, "presence_penalty", -0.5), (0.15, "repetition_penalty", 1.2),
        (0.15, "logit_bias", {str(rng.randrange(8, VOCAB)): rng.choice([-100, 5.0, 100])}),
        (0.2, "stop", rng.choice(["e", ["xx", "the"], ["\n"]])), (0.1, "stop_regex", ["[0-9]{2}", "[a-z] [a-z]"]), (0.1, "no_stop_trim", True),
        (0.2, "stop_token_ids", [rng.randrange(8, VOCAB) for _ in range(20)]), (0.6, "ignore_eos", True), (0.2, names["seed"], rng.randrange(1000)),
        (0.15, names["min"], 1), (0.2, "n", rng.choice([2, 3])), (0.1, "stream_interval", 3), (0.1, "skip_special_tokens", False),
    ]
    fields = {name: value for chance, name, value in options if rng.random() < chance}
    return {names["max"]: rng.randint(1, 96), **fields}


def prompt_ids(rng: random.Random) -> list[int]:
    shared = [2 + (7 * place + 13 * rng.randrange(4)) % VOCAB for place in range(rng.choice([0, 5, 16, 33, 60]))]
    return shared + [rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 60))]


def prompt_text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))


def wanted(seed: int, index: int) -> Wanted:
    """Request `index` of `seed`."""
    rng = random.Random(f"{seed}/{index}")
    path = rng.choice(["/generate", "/generate", "/v1/completions", "/v1/chat/completions"])
    is_native = path == "/generate"
    names = NATIVE_NAMES if is_native else OPENAI_NAMES
    sampling = mixture(rng, names)
    roll = rng.random()
    fate = "left" if roll < 0.05 else "aborted" if roll < 0.1 else "read"
    pattern = ""
    if fate != "read":
        sampling = {names["max"]: 300, "ignore_eos": True}
    elif rng.random() < 0.15:
        field, value, pattern = rng.choice(GRAMMARS)
        for name in (names["min"], "stop", "stop_regex", "stop_token_ids", "skip_special_tokens", "no_stop_trim"):
            sampling.pop(name, None)
        sampling |= {field: value, names["max"]: 120}
    common: dict[str, Any] = {"rid": f"{seed}-{index}", "priority": rng.choice([0, 0, 1, -1])}
    if rng.random() < 0.2:
        common["cache_salt"] = rng.choice(["red", "blue", f"own {index}"])
    if is_native:
        body = native_fields(rng) | {"sampling_params": sampling, **common}
    elif path == "/v1/completions":
        body = {"prompt": prompt_ids(rng) if rng.random() < 0.5 else prompt_text(rng), **sampling, **common}
        if rng.random() < 0.2:
            body |= {"logprobs": rng.choice([0, 3]), "echo": rng.random() < 0.5}
    else:
        body = {"messages": [{"role": "user", "content": prompt_text(rng)}], **sampling, **common} | chat_fields(rng, pattern)
    body["stream"] = fate == "left" or (fate == "read" and rng.random() < 0.5)
    if body["stream"] and not is_native:
        body["stream_options"] = {"include_usage": True}
    return Wanted(path, body, fate, int(sampling.get("n", 1)), pattern)


def native_fields(rng: random.Random) -> dict[str, Any]:
    ids = prompt_ids(rng)
    body: dict[str, Any] = {"input_ids": ids} if rng.random() < 0.7 else {"text": prompt_text(rng)}
    if rng.random() < 0.25:
        body |= {"return_logprob": True, "top_logprobs_num": rng.choice([0, 2]), "token_ids_logprob": rng.choice([None, [5, 6]])}
        body["logprob_start_len"] = rng.choice([-1, 0, len(ids) // 2]) if "input_ids" in body else rng.choice([-1, 0])
    return body


def chat_fields(rng: random.Random, pattern: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if not pattern and rng.random() < 0.3:
        fields["tools"] = [TOOL]
    if rng.random() < 0.2:
        fields |= {"logprobs": True, "top_logprobs": 2}
    if not pattern and rng.random() < 0.2:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    return fields


# --- answers -----------------------------------------------------------------------------------------------------------


class MixedLoad:
    def __init__(self, url: str, seed: int):
        self.paths: Counter[str] = Counter()
        self._url = url
        self._seed = seed

    def run(self, begin: int, end: int) -> Counter[str]:
        """Requests begin to end (exclusive), CONCURRENCY at a time. Returns how they ended."""
        return asyncio.run(self._run(begin, end))

    async def _run(self, begin: int, end: int) -> Counter[str]:
        indices, ends = iter(range(begin, end)), Counter[str]()
        limits = httpx.Limits(max_connections=2 * CONCURRENCY)
        async with httpx.AsyncClient(base_url=self._url, timeout=180, limits=limits, trust_env=False) as client:

            async def work() -> None:
                for index in indices:
                    want = wanted(self._seed, index)
                    self.paths[want.path] += 1
                    ends[await fulfil(client, want, random.Random(index))] += 1

            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return ends


async def fulfil(client: httpx.AsyncClient, want: Wanted, rng: random.Random) -> str:
    """Send, read, check. Returns ok, left or aborted."""
    if want.fate == "left":
        async with client.stream("POST", want.path, json=want.body) as response:
            async for _ in response.aiter_lines():
                break
        return "left"
    if want.fate == "aborted":
        task = asyncio.create_task(client.post(want.path, json=want.body))
        await asyncio.sleep(rng.random() * 0.5)
        await client.post("/abort_request", json={"rid": want.body["rid"]})
        response = await task
        assert response.status_code == 200, (want.body, response.text)
        return "aborted" if "abort" in response.text else "ok"
    if want.body["stream"]:
        await read_stream(client, want)
    else:
        response = await client.post(want.path, json=want.body)
        assert response.status_code == 200, (want, response.text)
        check_whole(want, response.json())
    return "ok"


async def read_stream(client: httpx.AsyncClient, want: Wanted) -> None:
    async with client.stream("POST", want.path, json=want.body) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert response.status_code == 200 and lines[-1] == "data: [DONE]", (want, lines[-2:])
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    if want.path == "/generate":
        check_native(want, collect_native(events, want.num_choices))
    elif want.path == "/v1/completions":
        choices, usage = collect_openai(events, want.num_choices, True, chat=False, is_garbage=True)
        assert usage is not None and usage["completion_tokens"] > 0, (want, usage)
        if not want.body.get("echo"):
            check_texts(want, [(choice.text, choice.finish_reason) for choice in choices])
    else:
        seen = {event["choices"][0]["index"]: event["choices"][0]["finish_reason"] for event in events if event["choices"]}
        assert sorted(seen) == list(range(want.num_choices)) and all(seen.values()), (want, seen)


def check_whole(want: Wanted, answer: Any) -> None:
    if want.path == "/generate":
        check_native(want, answer if isinstance(answer, list) else [answer])
        return
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(want.num_choices)), (want, answer)
    assert answer["usage"]["completion_tokens"] > 0 and all(choice["finish_reason"] for choice in choices), (want, answer)
    if want.path == "/v1/completions" and not want.body.get("echo"):
        check_texts(want, [(choice["text"], choice["finish_reason"]) for choice in choices])
    elif want.path == "/v1/chat/completions":
        check_texts(want, [(choice["message"]["content"] or "", choice["finish_reason"]) for choice in choices])


def check_native(want: Wanted, answers: list[dict[str, Any]]) -> None:
    assert len(answers) == want.num_choices, (want, len(answers))
    for answer in answers:
        meta, wish = answer["meta_info"], want.body
        assert meta["completion_tokens"] == len(answer["output_ids"]) and 0 <= meta["cached_tokens"] < meta["prompt_tokens"], (want, answer)
        if wish.get("return_logprob"):
            start = wish["logprob_start_len"]
            assert len(meta["output_token_logprobs"]) == len(answer["output_ids"]), (want, answer)
            assert len(meta["input_token_logprobs"]) == (meta["prompt_tokens"] - start if start >= 0 else 0), (want, answer)
    check_texts(want, [(answer["text"], answer["meta_info"]["finish_reason"]["type"]) for answer in answers])


def check_texts(want: Wanted, found: list[tuple[str, str]]) -> None:
    """An answer that the grammar ended matches it."""
    for text, reason in found:
        if want.pattern and reason == "stop":
            assert re.fullmatch(want.pattern, text), (want, text)
