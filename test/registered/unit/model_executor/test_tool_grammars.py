"""Forced tool calls: whatever the logits want, each format's reader finds the calls that were asked for, and nothing else."""
import json

import numpy as np
import pytest
import torch

from kits.grammar_world import END_ID, byte_vocabulary, text_of
from kits.parsing import Format as Reader
from sglane.entrypoints.openai.parsing import ToolUse, read_tools
from sglane.entrypoints.parsers import tool_calls
from sglane.entrypoints.validation import Fields
from sglane.model_executor.grammar import Grammars, Vocabulary
from sglane.model_executor.sampler import SampleRow, sample
from sglane.model_executor.slot_table import Slot
from sglane.plan.io_struct import Grammar, SamplingParams
from sglane.plan.step_plan import SlotStart

CALL_MARKERS = dict.fromkeys(marker for form in tool_calls.FORMATS.values() for marker in form.markers)
MARKERS = ["<think>", "</think>", *CALL_MARKERS, '" string="true">', "｜", "▁"]
BYTES = byte_vocabulary(120)
VOCABULARY = Vocabulary(pieces=[*BYTES.pieces, *(marker.encode() for marker in MARKERS)], end_token_ids=[END_ID],
                        size=len(BYTES.pieces) + len(MARKERS) + 3)
EXPONENTS = [VOCABULARY.pieces.index(letter) for letter in (b"e", b"E")]
GET = {"name": "get", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
GET_WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {
    "unit": {"enum": ["K", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}, "deep": {"type": "boolean"},
    "more": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False},
}, "required": ["unit", "days", "deep", "more"], "additionalProperties": False}}
NOW = {"name": "now"}
FORMATS = list(tool_calls.FORMATS)


@pytest.fixture(scope="module")
def grammars():
    return Grammars("xgrammar", VOCABULARY)


def use_of(name, choice, functions=(GET, GET_WEATHER, NOW), **fields) -> ToolUse:
    tools = [{"type": "function", "function": function} for function in functions]
    return read_tools(Fields({"tools": tools, "tool_choice": choice, **fields}), name)


def named(name):
    return {"type": "function", "function": {"name": name}}


def answer(grammars, grammar: Grammar, seed: int, num_tokens: int = 1500) -> str:
    """Random tokens that the grammar lets through. Markers and quotes are liked, so that strings come to an end; so is the end."""
    params = SamplingParams(max_new_tokens=num_tokens, grammar=grammar, seed=seed)
    slot = Slot(SlotStart(0, b"", 5, 5, params, np.arange(5, dtype=np.int32).tobytes()))
    slot.constrain(grammars.mask(grammar))
    gen, tokens = torch.Generator().manual_seed(seed), []
    while END_ID not in tokens:
        assert len(tokens) < num_tokens, text_of(VOCABULARY, tokens)
        logits = torch.randn(1, VOCABULARY.size, generator=gen)
        logits[0, len(BYTES.pieces):] += 4
        logits[0, [END_ID, VOCABULARY.pieces.index(b'"')]] += 5
        if tokens and VOCABULARY.pieces[tokens[-1]][-1:].isdigit():
            logits[0, EXPONENTS] = -50  # of numbers that are no longer finite
        tokens.append(int(sample(logits, [SampleRow(0, 5 + len(tokens), slot)])[0]))
        slot.history.append(np.array(tokens[-1:], np.int32))
    return text_of(VOCABULARY, tokens)


def check_call(name, arguments):
    if name == "get":
        assert list(arguments) == ["city"] and type(arguments["city"]) is str
    elif name == "now":
        assert arguments == {}
    else:
        assert list(arguments) == ["unit", "days", "deep", "more"] and arguments["unit"] in ("K", "F"), arguments
        assert arguments["days"] in range(1, 10) and type(arguments["deep"]) is bool and type(arguments["more"]["x"]) is bool, arguments


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thoughts", ["", "inside", "maybe"])
def test_required(grammars, name, thoughts):
    for seed in range(3):
        use = use_of(name, "required")
        grammar = Grammar(use.needed.grammar.kind, use.needed.grammar.text, thoughts=thoughts)
        text = answer(grammars, grammar, seed)
        prompt_end = "<think>\n" if thoughts == "inside" else ""
        parsed = Reader(name, "qwen3" if thoughts else None, use.schemas, prompt_end).parse([text])
        assert parsed.calls and not parsed.text, repr(text)
        for call, arguments in parsed.calls:
            check_call(call, arguments)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("function", ["get", "get_weather"])
def test_a_named_function_is_called_once(grammars, name, function):
    use = use_of(name, named(function))
    for seed in range(2):
        text = answer(grammars, use.needed.grammar, seed)
        parsed = Reader(name, None, use.schemas).parse([text])
        assert [call for call, _ in parsed.calls] == [function] and not parsed.text, text
        check_call(*parsed.calls[0])


@pytest.mark.parametrize("name", FORMATS)
def test_only_one_call(grammars, name):
    use = use_of(name, "required", parallel_tool_calls=False)
    for seed in range(2):
        assert len(Reader(name, None, use.schemas).parse([answer(grammars, use.needed.grammar, seed)]).calls) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_strict_tools_with_auto(grammars, name):
    """Text is free; what begins a call becomes one, and follows the schema if the tool is strict."""
    use = use_of(name, "auto", (GET, {**GET_WEATHER, "strict": True}, NOW))
    assert use.needed is not None and not use.needed.is_exclusive
    num_calls = num_texts = 0
    for seed in range(6):
        text = answer(grammars, use.needed.grammar, seed, num_tokens=4000)
        parsed = Reader(name, None, use.schemas).parse([text])
        num_calls, num_texts = num_calls + len(parsed.calls), num_texts + bool(parsed.text)
        for call, arguments in parsed.calls:
            if call == "get_weather":
                check_call(call, arguments)
        assert not any(opener in parsed.text for opener in tool_calls.FORMATS[name].openers), repr(text)
    assert num_calls and num_texts


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_held_to_a_grammar_unless_asked(choice):
    assert use_of("qwen3", choice).needed is None


def test_names_are_escaped_where_they_stand_in_json():
    use = use_of("qwen3", "required", [{"name": "a\\b"}])
    tag = json.loads(use.needed.grammar.text)["format"]["elements"][1]["tags"][0]
    assert json.loads(tag["begin"].partition("\n")[2] + "{}}") == {"name": "a\\b", "arguments": {}}
