"""Masks by both libraries: whatever the logits want, the answer matches; a matcher that starts late sees what one that was there saw."""
import json
import re
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
import zmq

from kits.grammar_world import END_ID, SPECIAL_ID, byte_vocabulary, text_of
from sglane.model_executor.grammar import Grammars, LazyGrammars
from sglane.model_executor.grammar_tickets import GrammarTickets
from sglane.model_executor.grammar_worker import try_out
from sglane.model_executor.sampler import SampleRow, sample
from sglane.model_executor.slot_table import Slot
from sglane.plan.io_struct import Grammar, PrepareGrammar, SamplingParams
from sglane.plan.step_plan import FromExecutor, GrammarReady, SlotStart
from sglane.utils.ipc import Receiver

SIZE = 160  # a multiple of 32
VOCABULARY = byte_vocabulary(SIZE)
SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}, "age": {"type": "integer"},
                                           "home": {"type": "object", "properties": {"no": {"type": "boolean"}}, "required": ["no"]}},
          "required": ["color", "age", "home"]}
GRAMMARS = [Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", "[A-C]{2,5}-[0-9]{3}"), Grammar("ebnf", 'root ::= "yes" | "no" root'),
            Grammar("json_schema", '{"type":"array","items":{"type":"boolean"},"maxItems":4}')]


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def grammars(backend):
    return Grammars(backend, VOCABULARY)


def answer(grammars, grammar, seed, num_tokens=400, **fields):
    """Tokens from logits that like anything but the grammar; up to the end token."""
    params = SamplingParams(max_new_tokens=num_tokens, grammar=grammar, seed=seed, **fields)
    prompt = np.arange(5, dtype=np.int32)
    slot = Slot(SlotStart(0, b"", 5, 5, params, prompt.tobytes()))
    slot.constrain(grammars.mask(grammar))
    gen, tokens = torch.Generator().manual_seed(seed), []
    while len(tokens) < num_tokens and END_ID not in tokens:
        logits = torch.randn(1, SIZE, generator=gen) * 3
        logits[0, SPECIAL_ID] += 20
        tokens.append(int(sample(logits, [SampleRow(0, 5 + len(tokens), slot)])[0]))
        slot.history.append(np.array(tokens[-1:], np.int32))
    return tokens


def check(grammar, text):
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text), text
    elif grammar.kind == "ebnf":
        assert re.fullmatch("(no)*yes", text), text
    elif grammar.text.startswith('{"type":"array"'):
        value = json.loads(text)
        assert len(value) <= 4 and all(type(item) is bool for item in value), text
    else:
        value = json.loads(text)
        assert list(value) == list(SCHEMA["properties"]) and value["color"] in ("red", "green") and type(value["age"]) is int, text
        assert type(value["home"]["no"]) is bool and len(value["home"]) == 1, text


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.7, "top_k": 3}, {"frequency_penalty": 1.5, "repetition_penalty": 1.3}],
                         ids=["greedy", "random", "filtered", "penalties"])
def test_answers_match(grammars, grammar, fields):
    for seed in range(8):
        tokens = answer(grammars, grammar, seed, **fields)
        assert tokens[-1] == END_ID, text_of(VOCABULARY, tokens)
        check(grammar, text_of(VOCABULARY, tokens))


def allowed(mask, outputs):
    logits = torch.zeros(SIZE)
    mask.apply(logits, np.array(outputs, np.int32))
    return (logits == 0).nonzero()[:, 0].tolist()


def ids(text):
    return [VOCABULARY.pieces.index(character.encode()) for character in text]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_a_late_matcher_catches_up(grammars, grammar):
    """Another rank takes over, or the request comes back after a retraction: same masks from there on."""
    tokens = answer(grammars, grammar, 3)
    steady = grammars.mask(grammar)
    for num in range(len(tokens)):
        expected = allowed(steady, tokens[:num])
        assert allowed(grammars.mask(grammar), tokens[:num]) == expected
        assert tokens[num] in expected and SPECIAL_ID not in expected


def test_the_end_is_allowed_when_the_grammar_may_end_and_then_required(grammars):
    mask = grammars.mask(Grammar("regex", "a{1,2}"))
    assert END_ID not in allowed(mask, [])
    assert {END_ID, *ids("a")} == set(allowed(mask, ids("a")))
    assert allowed(mask, ids("aa")) == [END_ID]
    assert len(allowed(mask, [*ids("aa"), END_ID])) == SIZE  # a step that was under way at the end: nobody takes its token


def test_a_token_that_does_not_fit_ends_the_answer(grammars):
    mask = grammars.mask(Grammar("regex", "a{10}"))
    assert allowed(mask, ids("ab")) == [END_ID]
    assert allowed(mask, ids("aba")) == [END_ID]


def test_a_grammar_that_does_not_compile_ends_the_answer(grammars):
    assert allowed(grammars.mask(Grammar("regex", "((")), []) == [END_ID]


def test_an_impossible_grammar_ends_the_answer(grammars):
    assert allowed(grammars.mask(Grammar("ebnf", 'root ::= "\u4e2d"')), []) == [END_ID]  # no token has these bytes


def test_logits_that_rule_out_all_that_is_allowed(grammars):
    logits = torch.zeros(SIZE)
    logits[ids("a")[0]] = float("-inf")
    grammars.mask(Grammar("regex", "a")).apply(logits, np.zeros(0, np.int32))
    assert int(logits.argmax()) == ids("a")[0]


def test_strict_schemas_refuse_other_properties(grammars):
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    start = ids('{"a":1')
    assert ids(",")[0] not in allowed(grammars.mask(Grammar("json_schema", schema)), start)
    assert ids(",")[0] in allowed(grammars.mask(Grammar("json_schema", schema, strict=False)), start)


def test_whitespace_comes_to_an_end(grammars):
    mask = grammars.mask(Grammar("json_schema", '{"type":"object"}', strict=False))
    spaces = ids("{" + " " * 40)
    lengths = [num for num in range(1, len(spaces)) if ids(" ")[0] in allowed(mask, spaces[:num])]
    assert lengths == list(range(1, len(lengths) + 1)) and len(lengths) < 40


@pytest.mark.parametrize("grammar, words", [
    (Grammar("json_schema", '{"type":"foo"}'), ("foo", "foo")), (Grammar("json_schema", '{"$ref":"#"}'), ("$ref", "no answer")),
    (Grammar("regex", "(("), ("parenthesis", "unclosed group")), (Grammar("ebnf", "root ::= x"), ("x", "x")),
    (Grammar("structural_tag", "{}"), ("format", "structural_tag")), (Grammar("lark", "x"), ("kind", "lark")),
])
def test_the_worker_says_what_is_wrong(grammars, backend, grammar, words):
    assert words[backend == "llguidance"] in try_out(grammars.backend, grammar)


def test_the_worker_takes_good_grammars(grammars):
    assert [try_out(grammars.backend, grammar) for grammar in GRAMMARS] == [""] * len(GRAMMARS)


def test_forced_text_may_be_spelled_in_any_way(grammars):
    """A single token, or its letters."""
    whole = VOCABULARY.pieces.index(b"true")
    assert {whole, *ids("t")} <= set(allowed(grammars.mask(Grammar("regex", "true")), []))


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
@pytest.mark.parametrize("thoughts", ["inside", "maybe"])
def test_the_answer_begins_where_the_thoughts_end(grammars, grammar, thoughts):
    grammar, opened = msgspec.structs.replace(grammar, thoughts=thoughts), "<think>" if thoughts == "maybe" else ""
    mask, text = grammars.mask(grammar), f"{opened}a < b, </thin"
    assert not {END_ID, SPECIAL_ID} & set(allowed(mask, ids(text)))
    assert {*ids("k z"), VOCABULARY.pieces.index(b"true")} <= set(allowed(mask, ids(text)))
    tokens = ids(f"{text}k>\n\n")
    plain = {token for token in allowed(grammars.mask(msgspec.structs.replace(grammar, thoughts="")), []) if not VOCABULARY.pieces[token].isspace()}
    assert plain == {token for token in allowed(mask, tokens) if not VOCABULARY.pieces[token].isspace()}
    answered = [*tokens, *answer(grammars, msgspec.structs.replace(grammar, thoughts=""), 1)]
    for num in range(len(tokens), len(answered)):
        assert answered[num] in allowed(mask, answered[:num]), text_of(VOCABULARY, answered)


def test_thoughts_may_be_left_out(grammars):
    first = set(allowed(grammars.mask(Grammar("regex", "[A-C]+", thoughts="maybe")), []))
    assert {*ids("<ABC")} <= first and not {END_ID, *ids("Dx{")} & first
    assert allowed(grammars.mask(Grammar("regex", "[A-C]+", thoughts="maybe")), ids("<")) == ids("t")
    assert not set(ids("ABC")) & set(allowed(grammars.mask(Grammar("regex", "[A-C]+", thoughts="maybe")), ids(" "))), "space is no part of the answer"


def test_a_ticket_ends_when_the_grammar_is_there(tmp_path, backend):
    """Compiled in the thread, not again for the request; a broken one does not end the thread; the context waits for the thread."""
    path = tmp_path / "vocabulary"
    path.write_bytes(msgspec.msgpack.encode(VOCABULARY))
    lazy, context = LazyGrammars(backend, str(path)), zmq.Context()
    receiver = Receiver(context, f"ipc://{tmp_path}/r", FromExecutor)
    slow = Grammar("json_schema", json.dumps({"enum": [f"value {number}" for number in range(2000)]}))
    with GrammarTickets(lazy, context, f"ipc://{tmp_path}/r", 3) as tickets:
        begin = time.monotonic()
        tickets.submit(PrepareGrammar(7, slow))
        tickets.submit(PrepareGrammar(8, Grammar("regex", "((")))
        assert time.monotonic() - begin < 0.1
        assert receiver.poll(30_000) and receiver.recv() == GrammarReady(3, 7)
        compile_s = time.monotonic() - begin
        begin = time.monotonic()
        mask = lazy.mask(slow)
        assert time.monotonic() - begin < max(0.5 * compile_s, 0.05)
        assert allowed(mask, []) != [END_ID]
        assert receiver.poll(30_000) and receiver.recv() == GrammarReady(3, 8)
    assert "grammar" not in [thread.name for thread in threading.enumerate()]
    receiver.close()
    context.term()
