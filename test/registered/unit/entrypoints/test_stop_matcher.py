"""Stop strings and stop expressions: what ends a text does not depend on how it comes in pieces."""
import time

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from sglane.entrypoints.stop_matcher import MAX_HELD_CHARACTERS, PatternMatcher, PatternTooSlow, StopMatcher, make_matcher


def matched(pieces, stops, keep=False, patterns=()):
    """(text, stop) after feeding the pieces."""
    matcher = make_matcher(stops, patterns, keep)
    shown = ""
    for piece in pieces:
        part, stop = matcher.feed(piece)
        shown += part
        if stop is not None:
            return shown, stop
        assert not any(stop in shown for stop in stops)
    return shown + matcher.flush(), None


def by_definition(text, stops, keep):
    """The stop that is complete first, of two the longer."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.booleans(), st.randoms())
def test_stops_by_definition_for_any_grouping(text, stops, keep, rng):
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert matched(pieces, stops, keep) == by_definition(text, stops, keep)


def test_stops_that_overlap_or_begin_alike():
    assert matched("xaab", ["aab", "ab"]) == ("x", "aab")
    assert matched("xab", ["aab", "ab"]) == ("x", "ab")
    assert matched("one STOP two", ["STOPPED", "STOP"]) == ("one ", "STOP")
    assert matched("the end", ["end"]) == ("the ", "end")
    assert matched("the en", ["end"]) == ("the en", None)
    assert matched("a STOP b", ["STOP"], keep=True) == ("a STOP", "STOP")


def test_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["<|end|>"], keep_stop=False)
    assert matcher.feed("hello <|e") == ("hello ", None)
    assert matcher.feed("x") == ("<|ex", None)
    assert matcher.feed("<|end|") == ("", None)
    assert matcher.feed(">") == ("", "<|end|>")


# --- stop expressions ---------------------------------------------------------------------------------------------------

PATTERNS = ["a+b", "ab|ba", "b{2}", "[ab]c", "a.c", "(?<=a)b+c", "^a", "ab?c", "bb$"]


def first_match(text, stops, patterns, keep):
    """The first prefix that contains a match, by trying all of them."""
    compiled = [(stop, regex.compile(regex.escape(stop))) for stop in stops] + [(pattern, regex.compile(pattern)) for pattern in patterns]
    for end in range(1, len(text) + 1):
        found = [(match.start(), stop) for stop, pattern in compiled if (match := pattern.search(text[:end])) and match.group()]
        if found:
            start, stop = min(found)
            return text[: end if keep else start], stop
    return text, None


@given(st.text("abc", max_size=14), st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
       st.lists(st.text("abc", min_size=1, max_size=3), max_size=2), st.booleans(), st.randoms())
def test_expressions_by_definition_for_any_grouping(text, patterns, stops, keep, rng):
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert matched_by_patterns(pieces, stops, patterns, keep) == first_match(text, stops, patterns, keep)


def matched_by_patterns(pieces, stops, patterns, keep):
    matcher = make_matcher(stops, patterns, keep)
    assert isinstance(matcher, PatternMatcher)
    shown = ""
    for piece in pieces:
        part, stop = matcher.feed(piece)
        shown += part
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def test_what_may_become_a_match_is_held_back():
    matcher = make_matcher((), ["\\n\\n+User:"], False)
    assert matcher.feed("hello\n") == ("hello", None)
    assert matcher.feed("\nUs") == ("", None)
    assert matcher.feed("a") == ("\n\nUsa", None)
    assert matcher.feed("\n\n\nUser: x") == ("", "\\n\\n+User:")


def test_what_is_held_back_is_bounded():
    matcher = make_matcher((), ["<.*>"], False)
    shown = "".join(matcher.feed("<" + "x" * 99)[0] for _ in range(10))
    assert 1000 - MAX_HELD_CHARACTERS <= len(shown) < 1000
    assert matcher.feed(">")[1] == "<.*>", "a later beginning is within the bound"
    matcher = make_matcher((), ["<x*>"], False)
    shown = matcher.feed("<" + "x" * 1000)[0]
    assert shown.startswith("<x") and matcher.feed("> and on") == (matcher_tail(shown, "<" + "x" * 1000) + "> and on", None)


def matcher_tail(shown, text):
    """What was not shown yet."""
    assert text.startswith(shown)
    return text[len(shown) :]


@pytest.mark.parametrize("pattern", ["(a|aa)+c", "(a*)*c|(a|a)*d"])
def test_an_expression_that_explodes_is_given_up(pattern):
    matcher = make_matcher((), [pattern], False)
    begin_s = time.monotonic()
    with pytest.raises(PatternTooSlow, match="takes too long"):
        for _ in range(200):
            matcher.feed("a")
    assert time.monotonic() - begin_s < 5


def test_without_expressions_the_plain_matcher_works():
    assert isinstance(make_matcher(["a"], (), False), StopMatcher)
