"""What answers promise, on every route of a real server: whole characters, one finish per choice, seeds, log probabilities, usage, parameters."""
import threading

import pytest

from kits.audit import assert_clean, wait_idle
from kits.server import Server
from kits.sse import collect_native, collect_openai
from kits.text_checkpoint import with_text

FLAGS = (
    "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "4096", "--max-running-requests", "16", "--chunked-prefill-size", "64",
    "--enable-cache-report", "--tool-call-parser", "qwen3",
)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "Once upon a time there was a robot"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = with_text("llama", tmp_path_factory.mktemp("model"))
    with Server("--model-path", str(folder), *FLAGS, env={"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}) as running:
        yield running


@pytest.fixture(autouse=True)
def books_balance(server):
    yield
    assert_clean(wait_idle(server), allowed_fallbacks=["tail_copy_skipped"])


def body_of(path, prompt=PROMPT, **fields):
    if path == "/generate":
        return {"text": prompt, "sampling_params": fields}
    return {**({"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}), **fields}


def texts_of(path, answer):
    if path == "/generate":
        return [item["text"] for item in (answer if isinstance(answer, list) else [answer])]
    return [choice["text"] if path == COMPLETIONS else choice["message"]["content"] or "" for choice in answer["choices"]]


@pytest.mark.parametrize("text", ["žluťoučký kůň", "日本語のテキスト", "👩‍👩‍👧 🌸", "e\u0301a\u0308 x", "mixed 語 é 🌸 end"])
def test_characters_of_several_tokens(server, text):
    """A grammar forces the text; most of its characters are several tokens of one byte."""
    native = body_of("/generate", regex=text, max_new_tokens=100)
    whole = server.ask("/generate", native)
    (streamed,) = collect_native(list(server.stream("/generate", native)), 1)
    assert whole["text"] == streamed["text"] == text
    for path in (COMPLETIONS, CHAT):
        events = list(server.stream(path, body_of(path, regex=text, max_tokens=100)))
        (choice,), _ = collect_openai(events, 1, False, chat=path == CHAT)
        assert choice.text == text and choice.finish_reason == "stop"
    stop = text[len(text) // 2]
    for path in (COMPLETIONS, CHAT):
        events = list(server.stream(path, body_of(path, regex=text, max_tokens=100, stop=[stop + "never", stop])))
        (choice,), _ = collect_openai(events, 1, False, chat=path == CHAT)
        assert choice.text == text[: text.index(stop)] and choice.matched_stop == stop


@pytest.mark.parametrize("num_choices", [1, 2, 3, 4])
@pytest.mark.parametrize(("path", "more"), [(COMPLETIONS, {}), (CHAT, {}), (CHAT, {"tools": [TOOL]}), (COMPLETIONS, {"stop": "e"})])
def test_one_finish_per_choice_and_usage(server, path, more, num_choices):
    """Streamed as whole: same texts by seed, same usage; the prompt counts once."""
    body = body_of(path, n=num_choices, temperature=1, seed=5, max_tokens=12, **more)
    whole = server.ask(path, body)
    events = list(server.stream(path, {**body, "stream_options": {"include_usage": True}}))
    choices, usage = collect_openai(events, num_choices, True, chat=path == CHAT, is_garbage=True)
    assert [choice.text for choice in choices] == texts_of(path, whole)
    assert [choice.finish_reason for choice in choices] == [choice["finish_reason"] for choice in whole["choices"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name], name
    single = server.ask(path, {**body, "n": 1})
    assert whole["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert 0 <= whole["usage"]["prompt_tokens_details"]["cached_tokens"] < whole["usage"]["prompt_tokens"]
    if num_choices > 1 and "stop" not in more:
        assert len(set(texts_of(path, whole))) > 1, "sampled choices are all the same"
    greedy = server.ask(path, {**body, "temperature": 0})
    assert len(set(texts_of(path, greedy))) == 1


@pytest.mark.parametrize(("path", "name"), [("/generate", "sampling_seed"), (COMPLETIONS, "seed"), (CHAT, "seed")])
def test_seeds(server, path, name):
    """The same seed gives the same text: alone, in company, cold, cached, streamed or not; different seeds differ; 0 is a seed."""
    limit = "max_new_tokens" if path == "/generate" else "max_tokens"

    def ask(seed):
        return texts_of(path, server.ask(path, body_of(path, temperature=1, ignore_eos=True, **{name: seed, limit: 16})))[0]

    server.flush_cache()
    alone = [ask(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    assert [ask(seed) for seed in range(4)] == alone
    neighbours = [threading.Thread(target=server.generate, args=(f"{number} neighbours",), kwargs={"max_new_tokens": 60, "ignore_eos": True})
                  for number in range(5)]
    for thread in neighbours:
        thread.start()
    beside = [ask(seed) for seed in range(4)]
    for thread in neighbours:
        thread.join()
    assert beside == alone


def test_prompt_logprobs_do_not_depend_on_hits(server):
    """Cold and after a hit, from any start: the same entries; decoding them again costs no more than the boundary token."""
    ids = [9 + (31 * place) % 480 for place in range(70)]
    server.flush_cache()

    def entries(start):
        wish = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2, "token_ids_logprob": [5, 9]}
        meta = server.generate(ids, max_new_tokens=3, extra=wish)["meta_info"]
        return meta, [[value for value, *_ in meta["input_token_logprobs"]], meta["input_top_logprobs"], meta["input_token_ids_logprobs"]]

    cold, (values, tops, asked) = entries(0)
    assert cold["cached_tokens"] == 0 and len(values) == 70 and values[0] is None
    for start in (0, 1, 15, 16, 17, 35, 68, 69, 70, -1):
        meta, (found, found_tops, found_asked) = entries(start)
        length = 70 - start if start >= 0 else 0
        assert len(found) == len(found_tops) == len(found_asked) == length, start
        assert found[1:] == pytest.approx(values[start + 1 :] if length else [], abs=1e-4), start
        for mine, theirs in ((found_tops, tops), (found_asked, asked)):
            for own, other in list(zip(mine, theirs[70 - length :]))[1:]:
                assert [token for _, token, _ in own] == [token for _, token, _ in other]
                assert [value for value, *_ in own] == pytest.approx([value for value, *_ in other], abs=1e-4)
        assert meta["cached_tokens"] <= (max(start - 1, 0) if start >= 0 else 69)
        if start >= 35:
            assert meta["cached_tokens"] >= start - 1, "the hit ends at the boundary token, which is computed again"
        if 0 < start < 70:
            assert found[0] == pytest.approx(values[start], abs=1e-4), "the first entry has a value too"


#: field -> (a value, one that must give another answer, other fields that both need). Native names.
EFFECTS = {
    "temperature": (0, 2.0, {"sampling_seed": 1}), "top_p": (0.01, 1.0, {"temperature": 2.0, "sampling_seed": 1}),
    "top_k": (1, -1, {"temperature": 2.0, "sampling_seed": 1}), "min_p": (0.99, 0.0, {"temperature": 2.0, "sampling_seed": 1}),
    "frequency_penalty": (0, 2.0, {}), "presence_penalty": (0, 2.0, {}), "repetition_penalty": (1.0, 2.0, {}),
    "sampling_seed": (1, 2, {"temperature": 1.0}), "max_new_tokens": (7, 9, {}), "logit_bias": ({}, {"300": 100}, {}), "regex": ("a{3}", "b{3}", {}),
    "ebnf": ('root ::= "a"', 'root ::= "b"', {}), "json_schema": ('{"const": 1}', '{"const": 2}', {}), "stop_regex": ("never", ".", {}),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_every_parameter_has_an_effect(server, name):
    first, second, needed = EFFECTS[name]
    answers = []
    for value in (first, second):
        answers.append(server.generate(PROMPT, **{"max_new_tokens": 40, "ignore_eos": True, **needed, name: value})["output_ids"])
    assert answers[0] != answers[1]


def test_ends(server):
    """stop, stop_token_ids, min_new_tokens, ignore_eos, no_stop_trim, skip_special_tokens."""
    ids = server.generate(PROMPT, max_new_tokens=12, ignore_eos=True)["output_ids"]
    third = server.generate(PROMPT, max_new_tokens=12, ignore_eos=True, stop_token_ids=[ids[2]])
    end = ids.index(ids[2])
    assert third["output_ids"] == ids[: end + 1] and third["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[2]}
    late = server.generate(PROMPT, max_new_tokens=12, ignore_eos=True, stop_token_ids=[ids[2]], min_new_tokens=end + 3)
    assert len(late["output_ids"]) >= end + 3
    eos = {"1": 100}
    assert server.generate(PROMPT, max_new_tokens=5, logit_bias=eos)["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    through = server.generate(PROMPT, max_new_tokens=5, logit_bias=eos, ignore_eos=True)
    assert through["output_ids"] == [1] * 5 and through["text"] == ""
    assert server.generate(PROMPT, max_new_tokens=2, logit_bias=eos, ignore_eos=True, skip_special_tokens=False)["text"] == "</s></s>"
    for keep in (False, True):
        assert server.generate(PROMPT, regex="abc", stop="b", no_stop_trim=keep)["text"] == ("ab" if keep else "a")


def test_a_prompt_of_one_token_has_its_entry_without_a_log_probability(server):
    wish = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = server.generate([42], max_new_tokens=2, ignore_eos=True, extra=wish)["meta_info"]
    assert [entry[:2] for entry in meta["input_token_logprobs"]] == [[None, 42]] and meta["input_token_logprobs_length"] == 1
    assert len(meta["input_top_logprobs"]) == 1 and len(meta["output_token_logprobs"]) == 2
    body = {"model": "default", "prompt": [42], "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1, "ignore_eos": True}
    logprobs = server.ask("/v1/completions", body)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == 3 and logprobs["token_logprobs"][0] is None
