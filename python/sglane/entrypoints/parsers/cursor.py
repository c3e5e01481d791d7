"""Reading a text that arrives in pieces. Parsers are generators: they yield where they need more text, so they read like parsers of whole texts.

Every decision depends on the text alone, never on where a piece ended: what may still become a marker is held until that is certain.
"""
from collections.abc import Callable, Collection, Generator

Reading = Generator[None, None, None]
#: Characters that may stand between markers.
SPACE = " \t\r\n"


class OutOfText(Exception):
    """The text ended where more was needed."""


class Malformed(Exception):
    """The text does not follow the format."""


class Cursor:
    """The text that was not read yet, and what was read since the last `mark`."""

    def __init__(self) -> None:
        self._rest = ""
        self._read: list[str] | None = None
        self.has_ended = False
        self.was_cut = False  # the model did not end the text by itself

    def push(self, piece: str) -> None:
        self._rest += piece

    def end(self, was_cut: bool) -> None:
        self.has_ended, self.was_cut = True, was_cut

    def mark(self, text: str = "") -> None:
        """Remember what is read from now on; `text` counts as read."""
        self._read = [text]

    def unmark(self) -> str:
        """What was read since the mark; nothing is remembered any longer."""
        read, self._read = self._read or [], None
        return "".join(read)

    def take_all(self) -> str:
        return self._take(len(self._rest))

    def _take(self, num_characters: int) -> str:
        taken, self._rest = self._rest[:num_characters], self._rest[num_characters:]
        if self._read is not None:
            self._read.append(taken)
        return taken

    def more(self) -> Reading:
        """Wait for the next piece. Raises OutOfText when there is none."""
        if self.has_ended:
            raise OutOfText
        yield

    def space(self) -> Reading:
        """Read white space."""
        while True:
            self._take(len(self._rest) - len(self._rest.lstrip(SPACE)))
            if self._rest:
                return
            yield from self.more()

    def until(self, *markers: str, sink: Callable[[str], object]) -> Generator[None, None, str]:
        """Read up to and with the first marker; what stands before it goes to `sink` as soon as it is certain. Returns the marker."""
        while True:
            found = [(start, marker) for marker in markers if (start := self._rest.find(marker)) >= 0]
            if found:
                start, marker = min(found)
                sink(self._take(start))
                self._take(len(marker))
                return marker
            sink(self._take(len(self._rest) - num_to_hold(self._rest, markers)))
            yield from self.more()

    def text_until(self, *markers: str) -> Generator[None, None, tuple[str, str]]:
        """(text before the first marker, the marker)."""
        parts: list[str] = []
        marker = yield from self.until(*markers, sink=parts.append)
        return "".join(parts), marker

    def expect(self, *words: str) -> Generator[None, None, str]:
        """Read one of `words`, of which none begins another. Raises Malformed as soon as it is none of them."""
        while True:
            for word in words:
                if self._rest.startswith(word):
                    return self._take(len(word))
            if not any(word.startswith(self._rest) for word in words):
                raise Malformed
            yield from self.more()

    def name(self, names: Collection[str]) -> Generator[None, None, str]:
        """Read one of `names`, which ends at white space or at `<`. Raises Malformed as soon as it is none of them."""
        while True:
            end = next((place for place, character in enumerate(self._rest) if character in SPACE or character == "<"), None)
            if end is not None:
                name = self._take(end)
                if name not in names:
                    raise Malformed
                return name
            if not any(name.startswith(self._rest) for name in names):
                raise Malformed
            yield from self.more()

    def json_object(self) -> Generator[None, None, str]:
        """Read from `{` to the `}` that closes it; what stands in strings does not count. The text may still be invalid JSON."""
        parts = [(yield from self.expect("{"))]
        depth, in_string, is_escaped = 1, False, False
        while True:
            for place, character in enumerate(self._rest):
                if is_escaped:
                    is_escaped = False
                elif in_string:
                    is_escaped, in_string = character == "\\", character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if depth == 0:
                        parts.append(self._take(place + 1))
                        return "".join(parts)
            parts.append(self.take_all())
            yield from self.more()


def num_to_hold(text: str, markers: Collection[str]) -> int:
    """Characters of the longest tail of `text` that begins a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[len(text) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
