"""Every kind of bad value on every route of a real server: a 4xx that names the field, while a neighbour's stream goes on unchanged."""
import json
import threading

import pytest

from kits.audit import assert_clean, wait_idle
from kits.canary import Canary
from kits.server import Server
from kits.text_checkpoint import VOCAB_SIZE, with_text

LIMIT = 192  # tokens of prompt and output
FLAGS = (
    "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "2048", "--context-length", str(LIMIT), "--max-running-requests", "16",
    "--chunked-prefill-size", "64", "--tool-call-parser", "qwen3", "--reasoning-parser", "qwen3", "--max-body-bytes", "4000000",
)
HI = [{"role": "user", "content": "hi"}]
#: A request of each route that works.
GOOD = {
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}}, "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2}, "/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [9]},
    "/abort_request": {"rid": "nobody"},
}
MODEL_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
#: Written into the body as they stand, as clients in several languages write them.
NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', "1e308", "true", '"1"', "[1]", "{}")
NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
INTEGERS = ("top_k", "n", "stream_interval")
IDS = ("[-1]", f"[{VOCAB_SIZE}]", f"[{2**31}]", f"[{2**63}]", f"[{2**64}]", "[1.5]", "[1.0]",
       '["3"]', "[true]", "[null]", "[[[3]]]", "3", '"3"', "{}")
BIAS = ('{"abc": 1}', '{"": 1}', f'{{"{VOCAB_SIZE}": 1}}', '{"-1": 1}', '{"1.5": 1}', '{"3": NaN}', '{"3": 1e999}', '{"3": 101}',
        '{"3": null}', '{"3": "1"}', '{"3": true}',
         "[3]", '"3"', "5", '{"٣": 1}', json.dumps({str(number): 1 for number in range(VOCAB_SIZE + 1)}))
STOPS = ('""', '[""]', "3", "[3]", "[null]", '{"a": 1}', json.dumps(["x"] * 1000), json.dumps("x" * 5000), '[["a"]]')
PATTERNS = ('"("', '""', '"a*"', '"(?:)"', '["["]', "3", '"(?P<n"', json.dumps("x" * 300),
            '"x{99999999999999999999}"', '"\\\\L<nobody>"', '"(a{1,9}){1,9}{1,9}"')
DEEP = "[" * 400 + "]" * 400
GRAMMARS = (
    ("json_schema", '"{"'), ("json_schema", "[1]"), ("json_schema", '{"not": {}}'),
    ("json_schema", '{"$ref": "#"}'), ("json_schema", '{"$ref": "other.json"}'),
    ("json_schema", '{"minimum": NaN}'), ("json_schema", '{"type": "nothing"}'), ("json_schema", json.dumps('{"items":' * 5000 + "{}" + "}" * 5000)),
    ("json_schema", '{"items":' * 150 + "{}" + "}" * 150), ("json_schema", '{"const": ' + "[" * 150 + "]" * 150 + "}"),
    ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    ("regex", '"(a{1,5"'), ("regex", json.dumps("(" * 5000 + ")" * 5000)), ("regex", "3"), ("ebnf", '"root ::="'),
    ("ebnf", '"no rules"'),
    ("ebnf", '"root ::= nobody"'), ("structural_tag", '{"structures": [{"begin": "a"}]}'), ("structural_tag", "[]"),
    ("structural_tag", '{"type": "x"}'),
)
PROMPT_FIELDS = {"/generate": ("text", "input_ids"), "/v1/completions": ("prompt",), "/v1/chat/completions": ("messages",)}
EMPTY = {
    "text": ('""', "[]", '[""]', '["a", ""]', "null", "3", "{}", "[null]"),
    "input_ids": ("[]", "[[]]", "[[3], []]", "[null]", "[[null]]", '""', "{}"),
    "prompt": ('""', "[]", "[[]]", '[""]', '["a", ""]', "[[3], []]", "null", "{}", "[null]", '["a", [3]]', '[3, "a"]', "true"),
    "messages": ("[]", "null", "3", '""', "[{}]", "[3]", "[null]", '[{"role": "user"}]', '[{"role": "user", "content": null}]', "{}",
                 '[{"role": "user", "content": []}]', '[{"role": "user", "content": [{"type": "image_url"}]}]', '[{"content": "x"}]',
                 '[{"role": "user", "content": 3}]', '[{"role": "user", "content": "x", "tool_calls": 5}]',
                 f'[{{"role": "user", "content": "x", "y": {DEEP}}}]'),
}


def body_with(route, field, literal):
    """The good body with one field written as `literal`; sampling parameters where the route has them."""
    fields = {name: json.dumps(value) for name, value in GOOD[route].items()}
    inside = route == "/generate" and field not in ("text", "input_ids", "rid", "stream", "priority", "token_ids_logprob", "top_logprobs_num",
                                                    "logprob_start_len", "cache_salt")
    if inside:
        fields["sampling_params"] = f'{{"max_new_tokens": 2, "{field}": {literal}}}'
    elif field in ("text", "input_ids"):
        fields = {field: literal}
    else:
        fields[field] = literal
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode("utf-8", "surrogatepass")


def cases():
    """(kind, route, field, literal)."""
    for route in MODEL_ROUTES:
        for field in (*NUMBERS, *INTEGERS):
            yield from (("numbers", route, field, literal) for literal in NOT_FINITE)
        yield from (("ids", route, "stop_token_ids", literal) for literal in IDS)
        yield from (("bias", route, "logit_bias", literal) for literal in BIAS)
        yield from (("stops", route, "stop", literal) for literal in STOPS)
        yield from (("patterns", route, "stop_regex", literal) for literal in PATTERNS)
        yield from (("grammars", route, field, literal) for field, literal in GRAMMARS)
        yield from (("prompts", route, field, literal) for field in PROMPT_FIELDS[route] for literal in EMPTY[field])
        yield from (("limits", route, field, literal) for field, literal in (
            ("n", "0"), ("n", "129"), ("n", str(2**70)), ("best_of", "3"), ("rid", '""'), ("rid", json.dumps("x" * 2000)), ("rid", "3"),
            ("rid", "{}"),
            ("stream", '"yes"'), ("stream", "1"), ("priority", str(2**40)), ("priority", "NaN"), ("cache_salt", "3"), ("cache_salt", "[]")))
    yield from (("ids", "/generate", field, literal) for field in ("input_ids", "token_ids_logprob") for literal in IDS)
    yield from (("ids", "/v1/completions", "prompt", literal) for literal in IDS if literal not in ('["3"]', '"3"'))
    yield from (("ids", "/detokenize", "tokens", literal) for literal in IDS)
    yield from (("numbers", "/generate", field, literal)
                for field in ("top_logprobs_num", "logprob_start_len") for literal in NOT_FINITE)
    yield from (("numbers", route, "max_tokens", literal) for route in MODEL_ROUTES[1:] for literal in NOT_FINITE)
    yield from (("prompts", "/tokenize", "prompt", literal) for literal in ("null", "3", "{}", "[3]", "[null]", '[["a"]]'))
    yield from (("limits", "/abort_request", "rid", literal) for literal in ('""', "3", "null", "[3]", '["a", null]', json.dumps("x" * 2000)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = with_text("llama", tmp_path_factory.mktemp("model"))
    with Server("--model-path", str(folder), *FLAGS, env={"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}) as running:
        yield running


@pytest.fixture(scope="module")
def canary(server):
    return Canary.record(server)


class Neighbour:
    """One greedy stream after another; all must be the same."""

    BODY = {"text": "A neighbour that", "sampling_params": {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}}

    def __init__(self, server):
        self._server = server
        self._expected = self._ids()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.different = []
        self.num_streams = 0

    def _ids(self):
        return list(self._server.stream("/generate", self.BODY))[-1]["output_ids"]

    def _run(self):
        while not self._stop.is_set():
            found = self._ids()
            self.num_streams += 1
            if found != self._expected:
                self.different.append(found)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def refusal_fault(response, field=None, statuses=(400,)):
    """What is wrong with an error; empty if nothing is. The same body serves OpenAI's SDK (`error`) and native clients (flat)."""
    if response.status_code not in statuses:
        return f"{response.status_code} {response.text[:200]}"
    body = response.json()
    core = body["error"]
    is_same = all(body[name] == core[name] for name in ("message", "type", "param", "code"))
    if body["object"] != "error" or not is_same or core["code"] != response.status_code:
        return f"shape: {response.text[:200]}"
    if field is not None and (core["param"] != field or field not in core["message"]):
        return f"does not name {field}: {response.text[:200]}"
    return ""


def check_all(server, canary, attempts):
    """attempts: (label, call) with call() -> fault. All are tried beside a neighbour; then nothing may have changed."""
    with Neighbour(server) as neighbour:
        faults = [f"{label}: {fault}" for label, call in attempts if (fault := call())]
    assert not faults, "\n".join(faults[:20])
    assert not neighbour.different and neighbour.num_streams
    assert_clean(wait_idle(server), allowed_fallbacks=["tail_copy_skipped"])
    canary.check(server)
    for route, body in GOOD.items():
        assert server.post(route, body).status_code == 200, route


@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in cases()}))
def test_wrong_fields(server, canary, kind):
    def attempt(route, field, literal):
        return lambda: refusal_fault(server.send("POST", route, body_with(route, field, literal)), field)

    check_all(server, canary, [(f"{route} {field}={literal[:60]}", attempt(route, field, literal))
                               for found, route, field, literal in cases() if found == kind])


MALFORMED = (
    b"", b"{", b"[]", b"null", b"123", b'"text"', b"true", b"NaN", b"\xff\xfe", b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\\ud800"}', b'{"a": 1} x', b"{'a': 1}", b'{"a": 1,}', b'{"a" 1}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"text": ' + b"9" * 5000 + b"}", b"\x00",
    b"\x1f\x8b\x08\x00",
    b'{"prompt": "a", "text": "a", "a": ' + b"[" * 300 + b"]" * 300 + b"}", '{"text": "a"}'.encode("utf-16"), b"\xef\xbb\xbf{}",
)


def test_malformed_bodies_and_requests(server, canary):
    def attempt(label, status, call, *arguments):
        return label, lambda: refusal_fault(call(*arguments), statuses=(status,))

    attempts = []
    for route in GOOD:
        for data in MALFORMED:
            if data or route != "/abort_request":  # without a body it would ask for nothing
                attempts.append(attempt(f"{route} {data[:30]!r}", 400, server.send, "POST", route, data))
        if route != "/abort_request":  # which takes what it gets, as curl sends it
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml"):
                attempts.append(attempt(f"{route} {kind!r}", 415, server.send, "POST", route, b"{}", kind))
        attempts.append(attempt(f"{route} DELETE", 405, server.send, "DELETE", route))
        attempts.append(attempt(f"{route}x", 404, server.send, "POST", route + "x", b"{}"))
        attempts.append(attempt(f"{route} large", 413, server.send, "POST", route, b'{"a": "' + b"x" * 4_000_000 + b'"}'))
    check_all(server, canary, attempts)


def test_the_last_of_two_equal_keys_counts(server):
    body = b'{"text": "a", "text": "b", "sampling_params": {"max_new_tokens": 7, "max_new_tokens": 1, "temperature": 0}}'
    answer = server.send("POST", "/generate", body).json()
    assert answer["output_ids"] == server.generate("b", max_new_tokens=1)["output_ids"]


def test_values_with_a_meaning(server, canary):
    """At the edge of what is allowed, and nulls."""
    greedy = server.generate("edge", max_new_tokens=6)["output_ids"]
    for literal in ("0", "-0.0", "1e-30", "1e-300", "5e-324"):
        content = f'{{"text": "edge", "sampling_params": {{"max_new_tokens": 6, "temperature": {literal}}}}}'.encode()
        assert server.send("POST", "/generate", content).json()["output_ids"] == greedy, literal
    nulls = dict.fromkeys((*NUMBERS, *INTEGERS, "stop", "stop_token_ids", "logit_bias", "stop_regex", "json_schema", "regex", "ebnf"))
    assert len(server.ask("/generate", {"text": "x", "sampling_params": {**nulls, "max_new_tokens": 3, "ignore_eos": True}})["output_ids"]) == 3
    for text in (" ", "\n\n", "\x00", "<|im_end|>", "</s><s>", "👩‍👩‍👧", "e\u0301"):
        assert server.generate(text, max_new_tokens=1)["meta_info"]["prompt_tokens"] > 0, repr(text)
        server.chat(text, max_tokens=1)
    canary.check(server)


def test_prompt_limits_are_exact(server, canary):
    """Prompt and output share LIMIT tokens: a prompt that leaves room for one is taken and ends by length at the limit."""
    for num_prompt in (*range(LIMIT - 4, LIMIT + 4), 2 * LIMIT, 3000):
        for max_new in (1, 2, 3, 20):
            response = server.post("/generate", {"input_ids": [7] * num_prompt, "sampling_params": {"max_new_tokens": max_new, "ignore_eos": True}})
            if num_prompt >= LIMIT:
                assert not refusal_fault(response, "input_ids") and str(num_prompt) in response.text and str(LIMIT) in response.text, response.text
            else:
                answer = response.json()
                assert len(answer["output_ids"]) == min(max_new, LIMIT - num_prompt), (num_prompt, max_new)
                assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert not refusal_fault(server.post("/v1/completions", {"prompt": [7] * LIMIT}), "prompt")
    assert not refusal_fault(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x y " * LIMIT}]}), "messages")
    assert_clean(wait_idle(server), allowed_fallbacks=["tail_copy_skipped"])
    canary.check(server)


def test_names_in_use(server):
    """A second request of the same name is refused while the first one runs, and does not disturb it."""
    body = {"text": "long", "rid": "taken", "sampling_params": {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}}
    events = server.stream("/generate", body)
    next(events)
    for route, again in (("/generate", {**GOOD["/generate"], "rid": "taken"}), ("/v1/completions", {**GOOD["/v1/completions"], "rid": "taken"}),
                         ("/v1/chat/completions", {**GOOD["/v1/chat/completions"], "rid": "taken"}),
                         ("/generate", {"text": ["a", "b"], "rid": ["free", "taken"]}), ("/generate", {"text": ["a", "b"], "rid": ["same", "same"]})):
        assert not refusal_fault(server.post(route, again), "rid"), route
    assert len(list(events)[-1]["output_ids"]) == 150
    for name in ("taken", "free", "same"):
        server.ask("/generate", {**GOOD["/generate"], "rid": name})
