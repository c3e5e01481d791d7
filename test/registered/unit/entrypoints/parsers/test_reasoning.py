"""Thoughts in front of an answer, wherever their marker stands and however the text is split."""
import pytest

from kits.parsing import Format, Parsed, assert_chunking_is_irrelevant
from sglane.entrypoints.parsers.answer import AnswerParser
from sglane.entrypoints.parsers.events import Reasoning, Text
from sglane.entrypoints.parsers.reasoning import FORMATS, ReasoningParser, ends_inside, opening
from sglane.server_args import ReasoningFormat

HYBRID = ["deepseek-v3", "glm45", "qwen3"]


def test_names():
    assert set(FORMATS) == set(ReasoningFormat.__args__) == {"deepseek-r1", *HYBRID}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("prompt_end", ["<|assistant|>", "<|assistant|><think>", "<think>\n"])
@pytest.mark.parametrize("text", [
    "<think>a < b\n\nc</think>Yes.\n", "\n<think>\na < b\n\nc\n</think>\n\nYes.\n", "<think> a < b\n\nc </think>\nYes.\n",
])
def test_thoughts(name, prompt_end, text):
    parsed = assert_chunking_is_irrelevant(Format(None, name, prompt_end=prompt_end), text)
    assert parsed == Parsed("Yes.\n", "a < b\n\nc")


@pytest.mark.parametrize("name", FORMATS)
def test_marker_in_the_prompt(name):
    form = Format(None, name, prompt_end="<think>\n")
    assert assert_chunking_is_irrelevant(form, "thoughts</think>\nYes") == Parsed("Yes", "thoughts")
    assert assert_chunking_is_irrelevant(form, "cut off </thi", was_cut=True) == Parsed("", "cut off </thi")
    assert assert_chunking_is_irrelevant(form, "</think>Yes") == Parsed("Yes")
    assert assert_chunking_is_irrelevant(form, "a <think> b </think></think> c") == Parsed("</think> c", "a <think> b")


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("text", ["Yes", " Yes ", "Yes <think>no</think>", "<thin", "  <", "", "\n"])
def test_no_thoughts(name, text):
    for prompt_end in ("<|assistant|>", "<think>\n\n</think>\n\n"):
        assert assert_chunking_is_irrelevant(Format(None, name, prompt_end=prompt_end), text) == Parsed(text)


def test_deepseek_r1_thinks_unless_the_prompt_says_no():
    assert assert_chunking_is_irrelevant(Format(None, "deepseek-r1"), "hm</think>Yes") == Parsed("Yes", "hm")
    assert assert_chunking_is_irrelevant(Format(None, "deepseek-r1"), "hm") == Parsed("", "hm")
    assert assert_chunking_is_irrelevant(Format(None, "deepseek-r1", prompt_end="</think>\n"), "Yes") == Parsed("Yes")


def test_states():
    assert [opening(FORMATS["qwen3"], end) for end in ("x<think>\n", "<think> x", "x", "</think>\n\n")] == ["inside", "maybe", "maybe", ""]
    assert [opening(FORMATS["deepseek-r1"], end) for end in ("x<think>\n", "x", "</think>\n\n")] == ["inside", "inside", ""]
    assert ends_inside("<think>so") and not ends_inside("<think>so</think>Y") and not ends_inside("so")


def test_calls_are_looked_for_after_the_thoughts_only():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = assert_chunking_is_irrelevant(Format("qwen3", "qwen3", {"f": {}}), f"<think>maybe {call}?</think>\n{call}")
    assert parsed == Parsed("", f"maybe {call}?", [("f", {})])


def test_thoughts_as_they_were_written():
    text = "\n<think>\nhm\n</think>\n\nYes"
    for pieces in ([text], text):
        parser = AnswerParser(ReasoningParser(False, keep_markers=True), None, thoughts_are_text=True, stream_thoughts=True)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(False)
        assert {type(event) for event in events} == {Text}
        assert "".join(event.text for event in events) == text


@pytest.mark.parametrize("text", ["one two three</think>Yes", "one two three"])
def test_thoughts_in_one_piece(text):
    parser = AnswerParser(ReasoningParser(True), None, thoughts_are_text=False, stream_thoughts=False)
    events = [event for character in text for event in parser.feed(character)] + parser.finish(False)
    assert [event for event in events if isinstance(event, Reasoning)] == [Reasoning("one two three")]
