"""Stop strings and stop expressions in a growing text. Results do not depend on how the text is grouped into pieces."""
import time
from collections.abc import Sequence
from typing import Protocol

import regex

#: Characters that wait for the end of a match at most; a longer match is not found.
MAX_HELD_CHARACTERS = 256
#: Longest time of one search, and what all searches of a text may take: so much, and so much more for each character. Seconds.
SEARCH_TIMEOUT_S = 0.05
BUDGET_S, BUDGET_PER_CHARACTER_S = 0.25, 0.0001


class PatternTooSlow(Exception):
    """Searches took too long; the message names the expression."""


class Matcher(Protocol):
    def feed(self, piece: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop that was found). After a stop nothing more may be fed."""

    def flush(self) -> str:
        """The held tail, which is no stop after all."""


def make_matcher(stops: Sequence[str], patterns: Sequence[str], keep_stop: bool) -> Matcher:
    """patterns: regular expressions, checked already."""
    return PatternMatcher(stops, patterns, keep_stop) if patterns else StopMatcher(stops, keep_stop)


class StopMatcher:
    """Finds the first stop string in a growing text and holds back a tail that may become one.

    The stop that is complete first counts; of two that end together, the longer. What was let through holds no part of a stop.
    """

    def __init__(self, stops: Sequence[str], keep_stop: bool):
        self._stops = stops
        self._keep_stop = keep_stop
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def feed(self, piece: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that was found). After a stop nothing more may be fed."""
        text = self._held + piece
        found = self._find(text)
        if found is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._keep_stop else end - len(stop)], stop
        num_held = self._num_to_hold(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """The held tail, which is no stop after all."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str) -> tuple[int, str] | None:
        """(end, stop) of the stop that is complete first."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _num_to_hold(self, text: str) -> int:
        """Characters of the longest tail that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class PatternMatcher:
    """Regular expressions beside stop strings, character by character: the first prefix of the text that contains a match ends it.

    Held back is what may become a match (a partial match at the end of the text), but at most MAX_HELD_CHARACTERS; a match never begins in text that
    was let through. `^` is the beginning of the text, `$` the end of the text so far. Of matches that end together the one that begins first counts.
    """

    def __init__(self, stops: Sequence[str], patterns: Sequence[str], keep_stop: bool):
        self._patterns = [(stop, regex.compile(regex.escape(stop))) for stop in stops] + [(text, regex.compile(text)) for text in patterns]
        self._keep_stop = keep_stop
        self._text = ""
        self._num_shown = 0  # characters
        self._spent_s = 0.0

    def feed(self, piece: str) -> tuple[str, str | None]:
        """As StopMatcher. Raises PatternTooSlow."""
        before, first_end = self._num_shown, len(self._text) + 1
        self._text += piece
        for end in range(first_end, len(self._text) + 1):
            found = [(start, stop) for stop, pattern in self._patterns for start in self._starts(pattern, end, partial=False)]
            if found:
                start, stop = min(found)
                self._num_shown = end if self._keep_stop else start
                return self._text[before : self._num_shown], stop
            begun = [start for _, pattern in self._patterns for start in self._starts(pattern, end, partial=True)]
            self._num_shown = max(min(begun, default=end), end - MAX_HELD_CHARACTERS)
        return self._text[before : self._num_shown], None

    def _starts(self, pattern: "regex.Pattern[str]", end: int, *, partial: bool) -> list[int]:
        """Where the first match (or what may become one) in the text up to `end` begins; empty if there is none."""
        begin_s = time.perf_counter()
        try:
            match = pattern.search(self._text, self._num_shown, end, partial=partial, timeout=SEARCH_TIMEOUT_S)
        except TimeoutError as error:
            raise PatternTooSlow(f"{pattern.pattern[:40]!r} takes too long") from error
        self._spent_s += time.perf_counter() - begin_s
        if self._spent_s > BUDGET_S + end * BUDGET_PER_CHARACTER_S:
            raise PatternTooSlow(f"{pattern.pattern[:40]!r} takes too long")
        return [] if match is None or match.start() == match.end() else [match.start()]

    def flush(self) -> str:
        """The held tail."""
        text, self._num_shown = self._text[self._num_shown :], len(self._text)
        return text
